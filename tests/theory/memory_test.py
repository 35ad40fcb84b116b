import dataclasses
import math

from absl.testing import parameterized
import jax

from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.theory import cost_model
from llamarl_jax.theory import devices
from llamarl_jax.theory import memory
from llamarl_jax.training import optimizer as optimizer_lib

H100 = devices.find('h100')
ROOM = memory.usable_bytes(H100)
TINY = config_lib.LlamaConfig(
  vocab_size=64,
  width=16,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_width=32,
  rope_theta=10000.0,
)


class TrainerTest(parameterized.TestCase):
  def test_state_is_that_of_the_real_trainer(self):
    specs = llama.abstract_params(TINY)
    params = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype), specs
    )
    optimizer = optimizer_lib.make_optimizer(learning_rate=1e-3)
    state = jax.eval_shape(optimizer.init, params)
    moments = sum(
      math.prod(leaf.shape) * leaf.dtype.itemsize
      for leaf in jax.tree.leaves(state)
      if leaf.shape
    )
    weights = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
    parts = memory.trainer_state(TINY, cost_model.TrainLayout(1, 1, 1, 1))
    self.assertEqual(parts['weights'], weights)
    self.assertEqual(parts['gradients'], weights)
    self.assertEqual(parts['optimizer'], moments)

  def test_405b_by_hand(self):
    config = catalog.find('llama-3.1-405b')
    parts = memory.trainer_state(config, cost_model.TrainLayout(8, 64, 1, 64))
    share = 405_853_388_800 / 512
    self.assertAlmostEqual(parts['weights'], 4 * share)
    self.assertAlmostEqual(parts['optimizer'], 8 * share)
    parts = memory.activations(
      config, cost_model.TrainLayout(8, 64, 1, 128), tokens=1000.0
    )
    # Two sequences a device, the input of each of 126 layers in bfloat16.
    self.assertAlmostEqual(parts['activations'], 2000 * 126 * 16384 * 2)
    # Float32 logits and their gradient, a chunk at most.
    self.assertAlmostEqual(parts['logits'], 2 * 2000 * 128256 * 4 / 8)
    parts = memory.activations(
      config, cost_model.TrainLayout(8, 64, 1, 640), tokens=1000.0
    )
    self.assertEqual(parts['logits'], 2 * 2**28)

  def test_more_is_kept_where_less_is_recomputed(self):
    config = catalog.find('llama-3.1-8b')
    sizes = [
      memory.activations(
        config, cost_model.TrainLayout(2, 4, 1, 8, remat), tokens=1000.0
      )['activations']
      for remat in ('full', 'dots', 'none')
    ]
    self.assertLess(3 * sizes[0], sizes[1])
    self.assertLess(sizes[1], sizes[2])
    with self.assertRaisesRegex(ValueError, 'dots'):
      memory.activations(
        config, cost_model.TrainLayout(1, 1, 1, 1, 'some'), tokens=1.0
      )

  @parameterized.product(
    fsdp=(8, 32), remat=('none', 'dots', 'full'), tokens=(20.0, 1300.0)
  )
  def test_one_more_sequence_a_device_would_not_fit(self, fsdp, remat, tokens):
    config = catalog.find('llama-3.1-8b')
    layout = cost_model.TrainLayout(2, fsdp, 1, fsdp, remat)
    most = memory.most_sequences(config, layout, tokens=tokens, room=ROOM)
    self.assertEqual(most % fsdp, 0)

    def total(micro_batch):
      wanted = dataclasses.replace(layout, micro_batch=micro_batch)
      return memory.total(memory.trainer(config, wanted, tokens=tokens))

    self.assertLessEqual(total(most), ROOM)
    self.assertGreater(total(most + fsdp), ROOM)

  def test_nothing_fits_where_the_state_does_not(self):
    config = catalog.find('llama-3.1-405b')
    layout = cost_model.TrainLayout(8, 1, 1, 1)
    most = memory.most_sequences(config, layout, tokens=1000.0, room=ROOM)
    self.assertEqual(most, 0)


class GeneratorTest(parameterized.TestCase):
  def test_70b_by_hand(self):
    config = catalog.find('llama-3.1-70b')
    layout = cost_model.GeneratorLayout(8, 1, 100)
    parts = memory.generator(config, layout, tokens=2048.0)
    self.assertAlmostEqual(parts['weights'], 70_553_706_496 * 2 / 8)
    # Keys and values of one head of 8 in each of 80 layers.
    self.assertAlmostEqual(parts['cache'], 100 * 2048 * 2 * 80 * 128 * 2)

  def test_quantized_are_the_matrices_of_layers(self):
    config = catalog.find('llama-3.1-8b')
    sizes = [
      memory.generator_weights(
        config, cost_model.GeneratorLayout(1, 1, 1, dtype)
      )
      for dtype in ('bfloat16', 'int8')
    ]
    tables = 2 * 128256 * 4096 + 65 * 4096
    self.assertEqual(sizes[0] - sizes[1], 8_030_261_248 - tables)

  @parameterized.parameters(1, 2, 8, 16)
  def test_one_more_slot_would_not_fit(self, tensor):
    config = catalog.find('llama-3.1-8b')
    layout = cost_model.GeneratorLayout(tensor, 1, 1)
    slots = memory.most_slots(config, layout, tokens=4096.0, room=ROOM)

    def total(slots):
      sized = dataclasses.replace(layout, slots=slots)
      return memory.total(memory.generator(config, sized, tokens=4096.0))

    self.assertGreater(slots, 0)
    self.assertLessEqual(total(slots), ROOM)
    self.assertGreater(total(slots + 1), ROOM)

  def test_misfit_is_explained_in_gigabytes(self):
    text = memory.explain({'weights': 90e9, 'cache': 2.5e9}, 72e9)
    self.assertIn('92.5 of 72.0 GB, 20.5 GB too much', text)
    self.assertIn('weights 90.0', text)
    self.assertIn('fits', memory.explain({'weights': 1e9}, 72e9))
    self.assertTrue(math.isclose(memory.usable_bytes(H100), 72e9))
