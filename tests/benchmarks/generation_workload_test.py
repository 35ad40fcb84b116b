import math

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from benchmarks import generation_engine
from benchmarks import generation_floor
from benchmarks import generation_workload
from benchmarks import workload as shapes
from benchmarks.peers import compare_generation


def _tiny(**changes):
  workload = generation_workload.WORKLOADS['tiny']
  return generation_workload.dataclasses.replace(workload, **changes)


class GenerationWorkloadTest(parameterized.TestCase):
  def test_skewed_lengths_are_log_normal(self):
    """Moments of many; the limit is far above all of them."""
    lengths = generation_workload.skewed_lengths(200_000, 1000.0, 0.5, 10**9)
    logs = np.log(lengths)
    self.assertAlmostEqual(np.mean(lengths) / 1000, 1, delta=0.01)
    self.assertAlmostEqual(np.std(logs), 0.5, delta=0.01)
    self.assertAlmostEqual(np.mean(logs), math.log(1000) - 0.125, delta=0.01)

  def test_skewed_workload_is_the_one_described(self):
    lengths = generation_workload.WORKLOADS['skewed'].lengths
    self.assertLen(lengths, 256)
    self.assertBetween(min(lengths), 1, 512)
    self.assertLessEqual(max(lengths), 512)
    # The standard error of the mean of 256 is 64 sqrt(e - 1) / 16 = 5.2.
    self.assertBetween(np.mean(lengths), 64 - 11, 64 + 11)

  def test_prompts_differ_and_have_no_padding(self):
    workload = generation_workload.WORKLOADS['equal']
    prompts = generation_workload.prompts(workload)
    self.assertEqual(prompts.shape, (32, 32))
    self.assertLen({tuple(prompt) for prompt in prompts}, 32)
    self.assertBetween(prompts.min(), 1, workload.shape.vocab_size - 1)
    self.assertLess(prompts.max(), workload.shape.vocab_size)

  def test_batches_and_occupancy_by_hand(self):
    """Batches 3 9 1 and 4 7 2 of 3 slots take 9 + 7 steps for 26 tokens."""
    workload = _tiny(slots=3)
    batches = generation_workload.batches(workload)
    lengths = [workload.lengths[batch] for batch in batches]
    self.assertEqual(lengths, [(3, 9, 1), (4, 7, 2)])
    occupancy = generation_workload.static_occupancy(workload)
    self.assertAlmostEqual(occupancy, 26 / (3 * 16))


class FloorTest(parameterized.TestCase):
  def test_cost_of_one_token(self):
    """As many multiply-adds as a forward pass; a row of keys and values."""
    shape = shapes.WORKLOADS['tiny']
    cost = generation_floor.step_cost(_tiny(slots=1, prompt=1, lengths=(1,)))
    one = shapes.dataclasses.replace(shape, rows=1, prompt=0, completion=1)
    self.assertEqual(cost.flops, shapes.forward_flops(one))
    self.assertEqual(cost.weight_bytes, 4 * shapes.num_parameters(shape))
    row = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    self.assertEqual(cost.cache_bytes, 4 * row)

  def test_used_cache_is_the_mean_over_steps(self):
    """Tokens at 4 and 5 after a prompt of 4, and one at 4: (4 + 5 + 4) / 3."""
    workload = _tiny(slots=1, prompt=4, lengths=(2, 1))
    one = generation_floor.step_cost(_tiny(slots=1, prompt=1, lengths=(1,)))
    cost = generation_floor.step_cost(workload)
    self.assertAlmostEqual(cost.cache_bytes / one.cache_bytes, 13 / 3)

  def test_products_are_all_matrices_of_a_layer(self):
    workload = _tiny()
    shape = workload.shape
    counted = sum(
      count * size_in * size_out
      for (size_in, size_out), count in (
        generation_floor.layer_products(workload).items()
      )
    )
    matrices = shapes.num_parameters(shape) - shape.vocab_size * shape.width
    norms = (2 * shape.num_layers + 1) * shape.width
    self.assertEqual(counted, (matrices - norms) // shape.num_layers)

  def test_rate_takes_the_faster_library(self):
    workload = _tiny()
    sizes = generation_floor.layer_products(workload)
    seconds = {('xla', size): 2.0 for size in sizes}
    seconds |= {('numpy', size): 1.0 for size in sizes}
    flops = sum(
      2.0 * count * workload.slots * math.prod(size)
      for size, count in sizes.items()
    )
    each = 1.0 / generation_floor.REPEATS
    self.assertAlmostEqual(
      generation_floor.product_rate(workload, seconds),
      flops / (each * sum(sizes.values())),
    )


class EngineTest(absltest.TestCase):
  def test_every_completion_has_its_length(self):
    workload = _tiny()
    engine = generation_engine.make_engine(workload, segment_length=4)
    policy = generation_engine.load_policy(workload)
    asked = generation_engine.requests(
      generation_workload.prompts(workload), workload.lengths, 1.0
    )
    run = generation_engine.run(engine, lambda: policy, asked)
    made = tuple(len(c.tokens) for c in run.completions)
    self.assertEqual(made, workload.lengths)
    self.assertEqual(sum(s.num_tokens for s in run.stats), workload.num_tokens)
    # 26 tokens in 4 slots: not in fewer steps than the longest has tokens.
    self.assertGreaterEqual(run.num_steps, 9)
    self.assertEqual(run.occupancy(4), 26 / (4 * run.num_steps))


class AgreementTest(parameterized.TestCase):
  @parameterized.parameters(
    ([[1, 2, 3]], [[1, 2, 3]], 1.0),
    # What follows a token that differs is not compared.
    ([[1, 2, 3]], [[1, 5, 3]], 1 / 2),
    ([[1, 2], [3, 4]], [[1, 2], [9, 4]], 2 / 3),
  )
  def test_by_hand(self, ours, theirs, expected):
    self.assertAlmostEqual(compare_generation.agreement(ours, theirs), expected)

  def test_another_model_is_found_out(self):
    results = {'peer': {'agreement': 0.5}}
    with self.assertRaisesRegex(ValueError, 'peer takes the same'):
      compare_generation.check(results)


if __name__ == '__main__':
  absltest.main()
