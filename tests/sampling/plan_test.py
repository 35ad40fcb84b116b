"""Cache bytes by hand, shapes, and requests that can never be answered."""

from absl.testing import absltest
from absl.testing import parameterized

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.sampling import plan

_CONFIG = config_lib.LlamaConfig(
  vocab_size=5,
  width=8,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=4,
  mlp_width=8,
  rope_theta=1e4,
)


def _settings(**changes):
  fields = {'num_slots': 40, 'segment_length': 2, 'max_prompt': 3, 'max_new': 4}
  return plan.EngineSettings(**(fields | changes))


def _request(prompt=(1, 2), **changes):
  fields = {'num_samples': 2, 'temperature': 1.0, 'max_new_tokens': 4}
  problem = types.Problem(index=1, prompt='', answer='')
  return types.Request(
    1, types.Stream.TRAIN, problem, tuple(prompt), **(fields | changes)
  )


class CachePlanTest(parameterized.TestCase):
  @parameterized.parameters(
    # Bytes a position: 3 layers, 2 heads, keys and values of 4 elements;
    # int8 with a float32 scale for each vector of 4.
    ({}, 192),
    ({'compute_dtype': 'bfloat16'}, 96),
    ({'cache_dtype': 'int8'}, 96),
  )
  def test_bytes(self, changes, position):
    found = plan.make_plan(_CONFIG, _settings(**changes))
    # 40 slots of 3 + 4 positions; a quarter as many prompts of 3 - 1.
    self.assertEqual(found.num_slots, 40)
    self.assertEqual(found.slot_bytes, 40 * 7 * position)
    self.assertEqual(found.num_lines, 10)
    self.assertEqual(found.line_bytes, 10 * 2 * position)
    self.assertEqual(found.total_bytes, 300 * position)
    self.assertIn('40 slots of 7 positions and 10 prompts', found.describe())

  @parameterized.parameters(
    (300 * 192, 40),
    (300 * 192 - 1, 39),
    # 8 slots and 4 prompts; with 9, of one prompt more room there is none.
    ((8 * 7 + 4 * 2) * 192, 8),
    (9 * 192, 1),
    (10**9, 40),
  )
  def test_budget(self, cache_bytes, num_slots):
    settings = _settings(cache_bytes=cache_bytes)
    found = plan.make_plan(_CONFIG, settings)
    self.assertEqual(found.num_slots, num_slots)
    self.assertLessEqual(found.total_bytes, cache_bytes)

  def test_budget_without_a_slot(self):
    with self.assertRaisesRegex(
      ValueError, r'cache_bytes=1727 .*3 tokens with 4.*takes 1728 bytes'
    ):
      plan.make_plan(_CONFIG, _settings(cache_bytes=9 * 192 - 1))


class ShapesTest(parameterized.TestCase):
  @parameterized.parameters(
    (1, (1,)), (2, (1, 2)), (8, (1, 8)), (9, (1, 8, 9)), (64, (1, 8, 64))
  )
  def test_counts(self, most, expected):
    self.assertEqual(plan.counts(most), expected)

  @parameterized.parameters((1, 1), (4, 1), (5, 8), (8, 8), (9, 8), (33, 64))
  def test_split_pads_less_than_half(self, number, size):
    self.assertEqual(plan.split(number, (1, 8, 64)), size)

  @parameterized.parameters(
    (10, (10,)),
    (160, (64, 96, 160)),
    (500, (64, 96, 160, 256, 384, 500)),
  )
  def test_read_lengths(self, capacity, expected):
    self.assertEqual(plan.read_lengths(capacity, 64), expected)
    self.assertEqual(plan.bucket(capacity, expected), capacity)
    self.assertEqual(plan.bucket(1, expected), expected[0])


class CheckFitsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('empty_prompt', _request(()), 'Request 1 has a prompt of 0 tokens'),
    ('long_prompt', _request([1] * 4), 'prompt of 4 tokens.*hold 1 to 3'),
    (
      'many_new',
      _request(max_new_tokens=5),
      'up to 5 new tokens.*hold 1 to 4, 7 tokens with the prompt',
    ),
    ('none_new', _request(max_new_tokens=0), 'up to 0 new tokens'),
    ('min_new', _request(min_new_tokens=5), 'min_new_tokens=5.*max_.*=4'),
    ('samples', _request(num_samples=0), 'asks for 0 completions'),
    ('stop', _request(stop_strings=('a', '')), 'empty stop string'),
    ('temperature', _request(temperature=-1.0), 'temperature -1.0'),
    ('top_k', _request(top_k=-1), 'top_k=-1.*at least 0'),
    ('top_p', _request(top_p=0.0), 'top_p=0.0.*above 0'),
    ('min_p', _request(min_p=1.5), 'min_p=1.5'),
  )
  def test_refuses(self, request, message):
    with self.assertRaisesRegex(ValueError, message):
      plan.check_fits(request, max_prompt=3, max_new=4)

  def test_takes_what_just_fits(self):
    request = _request([1] * 3, min_new_tokens=4)
    plan.check_fits(request, max_prompt=3, max_new=4)


if __name__ == '__main__':
  absltest.main()
