import dataclasses
import math

from absl.testing import parameterized
import numpy as np

from benchmarks import train_steps
from benchmarks import workload
from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import arithmetic
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices

H100 = devices.find('h100')
IDEAL = cost_model.Efficiency(1.0, 1.0, 1.0, 0.0)
LLAMA = catalog.find('llama-3.1-8b')


class ArithmeticTest(parameterized.TestCase):
  @parameterized.parameters(*workload.WORKLOADS)
  def test_flops_are_those_the_benchmark_counts(self, name):
    shape = workload.WORKLOADS[name]
    pairs = shape.length * (shape.length + 1) / 2
    self.assertEqual(
      arithmetic.forward_flops(
        train_steps.llama_config(shape),
        num_tokens=shape.rows * shape.length,
        num_pairs=shape.rows * pairs,
        # Prompts are read only.
        num_scored=shape.rows * shape.completion,
      ),
      workload.forward_flops(shape),
    )

  @parameterized.parameters(*catalog.ARCHITECTURES)
  def test_matrices_are_the_parameters_without_norms(self, name):
    config = catalog.find(name)
    norms = (2 * config.num_layers + 1) * config.width
    matrices = config.num_layers * arithmetic.layer_weights(config)
    tables = 1 if config.tie_embeddings else 2
    matrices += tables * arithmetic.head_weights(config)
    self.assertEqual(matrices + norms, config_lib.num_parameters(config))


class DevicesTest(parameterized.TestCase):
  @parameterized.parameters(*devices.DEVICES)
  def test_every_figure_is_there_and_has_a_source(self, name):
    device = devices.find(name)
    self.assertEqual(device.name, name)
    self.assertTrue(all(s.startswith('https://') for s in device.sources))
    self.assertGreater(device.fast_link, device.slow_link)
    self.assertGreaterEqual(
      devices.peak(device, 'int8'), devices.peak(device, 'bfloat16')
    )

  def test_unknown_names_are_refused(self):
    with self.assertRaisesRegex(ValueError, 'h100'):
      devices.find('h900')
    with self.assertRaisesRegex(ValueError, 'bfloat16'):
      devices.peak(H100, 'float7')

  def test_all_reduce_by_hand(self):
    # NCCL's model for 16 nodes of 8: 6.8 + 2 (7 x 0.6 + 4 x 5) us.
    self.assertAlmostEqual(devices.all_reduce_latency(H100, 128), 55.2e-6)
    # 8 MB over 8 devices: 2 x 7/8 x 8 MB at 450 GB/s.
    self.assertAlmostEqual(
      devices.all_reduce_seconds(H100, 8e6, 8, 1.0),
      6.8e-6 + 8.4e-6 + 14e6 / 450e9,
    )
    # Over 2 nodes: each device sends 2 x 1/2 of its eighth at 50 GB/s more.
    self.assertAlmostEqual(
      devices.all_reduce_seconds(H100, 8e6, 16, 0.5),
      6.8e-6 + 18.4e-6 + 2 * (14e6 / 450e9 + 1e6 / 50e9),
    )
    self.assertEqual(devices.all_reduce_seconds(H100, 8e6, 1, 1.0), 0.0)


class DecodeTest(parameterized.TestCase):
  def test_one_slot_takes_as_long_as_reading_the_weights(self):
    layout = cost_model.GeneratorLayout(1, 1, 1)
    cost = cost_model.decode_step(
      LLAMA, H100, IDEAL, layout, active=1.0, context=0.0
    )
    # 7.5 G weights: all but the embedding and the norms.
    norms = (2 * 32 + 1) * 4096
    read = 8_030_261_248 - 128256 * 4096 - norms
    self.assertAlmostEqual(float(cost.seconds), 2 * read / 3.35e12)

  def test_caches_are_read_once_per_slot(self):
    layout = cost_model.GeneratorLayout(8, 1, 1)

    def seconds(active, context):
      return float(
        cost_model.decode_step(
          LLAMA, H100, IDEAL, layout, active=active, context=context
        ).compute
      )

    # 2 x 32 layers x 8 heads x 128 x 2 bytes a token, over 8 devices.
    token = 2 * 32 * 8 * 128 * 2 / 8 / 3.35e12
    self.assertAlmostEqual(
      seconds(4.0, 1000.0) - seconds(4.0, 0.0), 4000 * token
    )

  def test_heads_beyond_the_shared_ones_are_repeated(self):
    costs = [
      cost_model.decode_step(
        LLAMA,
        H100,
        IDEAL,
        cost_model.GeneratorLayout(tensor, 1, 1),
        active=512.0,
        context=8192.0,
      ).compute
      - cost_model.decode_step(
        LLAMA,
        H100,
        IDEAL,
        cost_model.GeneratorLayout(tensor, 1, 1),
        active=512.0,
        context=0.0,
      ).compute
      for tensor in (4, 8, 16)
    ]
    self.assertGreater(costs[0], 1.5 * costs[1])
    # Weights no longer bound it at 16: only their part may differ.
    np.testing.assert_allclose(costs[1], costs[2], rtol=0.05)

  @parameterized.parameters('bfloat16', 'float8')
  def test_seconds_a_sample_fall_with_the_slots(self, dtype):
    layout = cost_model.GeneratorLayout(8, 1, 1, dtype)
    active = 2.0 ** np.arange(10)
    seconds = cost_model.decode_step(
      LLAMA,
      H100,
      cost_model.Efficiency(),
      layout,
      active=active,
      context=1000.0 + 0 * active,
    ).seconds
    self.assertTrue(np.all(np.diff(seconds / active) < 0))
    self.assertTrue(np.all(np.diff(seconds) >= 0))

  def test_the_host_is_a_floor(self):
    slow = cost_model.Efficiency(kernel_seconds=1e-3, kernels_per_layer=10)
    cost = cost_model.decode_step(
      LLAMA,
      H100,
      slow,
      cost_model.GeneratorLayout(8, 1, 1),
      active=1.0,
      context=10.0,
    )
    self.assertAlmostEqual(float(cost.seconds), 32 * 10 * 1e-3)


class TrainTest(parameterized.TestCase):
  def test_arithmetic_at_the_peak(self):
    layout = cost_model.TrainLayout(1, 1, 1, 4, remat='none')
    cost = cost_model.train_pass(
      LLAMA, H100, IDEAL, layout, tokens=100.0, pairs=5050.0
    )
    flops = 3 * arithmetic.forward_flops(
      LLAMA, num_tokens=400.0, num_pairs=20200.0, num_scored=400.0
    )
    self.assertAlmostEqual(cost.compute, flops / 989.4e12)
    full = dataclasses.replace(layout, remat='full')
    again = cost_model.train_pass(
      LLAMA, H100, IDEAL, full, tokens=100.0, pairs=5050.0
    )
    self.assertAlmostEqual(again.compute / cost.compute, 4 / 3)

  def test_seconds_a_sample_fall_with_the_micro_batch(self):
    """Weights of 8 nodes are gathered once a pass."""
    seconds = []
    for micro_batch in (64, 128, 256, 512):
      layout = cost_model.TrainLayout(1, 64, 1, micro_batch)
      cost = cost_model.train_step(
        LLAMA,
        H100,
        cost_model.Efficiency(),
        layout,
        samples=512,
        tokens=512.0,
        pairs=512 * 513 / 2,
      )
      seconds.append(float(cost.seconds))
    self.assertTrue(all(np.diff(seconds) <= 0), seconds)
    self.assertLess(seconds[-1], seconds[0])

  def test_gathering_by_hand(self):
    layout = cost_model.TrainLayout(1, 64, 1, 64)
    cost = cost_model.train_pass(
      LLAMA, H100, IDEAL, layout, tokens=1.0, pairs=1.0
    )
    # Weights twice and gradients once, 63/64 of 2 bytes each, at 50 GB/s;
    # next to nothing hides it.
    moved = 3 * 63 / 64 * 2 * 8_030_261_248
    self.assertTrue(math.isclose(cost.seconds, moved / 50e9, rel_tol=1e-3))


class PublicationTest(parameterized.TestCase):
  def test_slower_end_sets_the_time(self):
    def seconds(**ends):
      return cost_model.publication_seconds(1e12, H100, IDEAL, **ends)

    # Receivers: 1 TB over 8 devices at 50 GB/s.
    self.assertAlmostEqual(seconds(senders=512, receivers=8, replicas=1), 2.5)
    # Senders: 64 TB from 128.
    self.assertAlmostEqual(seconds(senders=128, receivers=8, replicas=64), 10.0)
    # Flat, as model and devices grow together.
    twice = cost_model.publication_seconds(
      2e12, H100, IDEAL, senders=256, receivers=16, replicas=64
    )
    self.assertAlmostEqual(twice, 10.0)
