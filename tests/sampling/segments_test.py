"""The arrays by which slots are filled, and completions as host values."""

from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.sampling import segments
from llamarl_jax.sampling import slots as slots_lib

_CONFIG = config_lib.LlamaConfig(
  vocab_size=5,
  width=8,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=4,
  mlp_width=8,
  rope_theta=1e4,
)


def _request(index, prompt=(1, 2), stream=types.Stream.TRAIN, **changes):
  fields = {'num_samples': 2, 'temperature': 1.0, 'max_new_tokens': 4}
  problem = types.Problem(index=index, prompt='', answer='')
  return types.Request(
    index, stream, problem, tuple(prompt), **(fields | changes)
  )


class SegmentsTest(parameterized.TestCase):
  def test_starting(self):
    first = _request(7, temperature=0.5, top_k=3, min_new_tokens=2)
    other = _request(
      7, (3, 4, 3), types.Stream.EVALUATION, top_p=0.9, min_p=0.1
    )
    starts = [
      segments.Start(first, 0, line=5, slot=4),
      segments.Start(other, 1, line=2, slot=0),
    ]
    rows = segments.starting(starts, size=4, num_slots=8)
    # Padded with a slot that does not exist.
    np.testing.assert_array_equal(rows.slots, [4, 0, 8, 8])
    np.testing.assert_array_equal(rows.lines[:2], [5, 2])
    np.testing.assert_array_equal(rows.prompt_length, [2, 3, 1, 1])
    np.testing.assert_array_equal(rows.last_token[:2], [2, 3])
    np.testing.assert_array_equal(rows.admission[:2], [7, 7])
    np.testing.assert_array_equal(rows.sample[:2], [0, 1])
    np.testing.assert_array_equal(rows.stream[:2], [0, 1])
    np.testing.assert_array_equal(rows.temperature[:2], [0.5, 1])
    np.testing.assert_array_equal(rows.top_k[:2], [3, 0])
    np.testing.assert_array_equal(rows.top_p[:2], np.float32([1, 0.9]))
    np.testing.assert_array_equal(rows.min_p[:2], np.float32([0, 0.1]))
    np.testing.assert_array_equal(rows.min_new[:2], [2, 0])
    np.testing.assert_array_equal(rows.max_new[:2], [4, 4])

  def test_resumed(self):
    one = segments.Suspended(
      _request(3),
      1,
      np.int32([4, 0]),
      np.float32([-1, -2]),
      np.int32([8, 9]),
    )
    self.assertEqual(segments.sequence(one), [1, 2, 4, 0])
    rows = segments.resumed([(one, 6)], size=2, num_slots=8, max_new=4)
    np.testing.assert_array_equal(rows.slots, [6, 8])
    np.testing.assert_array_equal(rows.prompt_length[:1], [2])
    np.testing.assert_array_equal(rows.num_new, [2, 0])
    np.testing.assert_array_equal(rows.last_token[:1], [0])
    np.testing.assert_array_equal(rows.tokens[0], [4, 0, 0, 0])
    np.testing.assert_array_equal(rows.log_probs[0], [-1, -2, 0, 0])
    np.testing.assert_array_equal(rows.versions[0], [8, 9, 0, 0])

  def test_slots_give_completions(self):
    state = slots_lib.init_state(_CONFIG, 2, 7, 4).replace(
      finish=np.array([slots_lib.FULL, slots_lib.RUNNING]),
      num_new=np.array([4, 2]),
      tokens=np.arange(8).reshape(2, 4),
      log_probs=-np.arange(8.0).reshape(2, 4),
      versions=np.ones((2, 4), np.int32),
    )
    request = _request(5)
    one = segments.Slots(state).completion(1, request, 0, num_new=2)
    self.assertIs(one.request, request)
    np.testing.assert_array_equal(one.tokens, [4, 5])
    np.testing.assert_array_equal(one.log_probs, [-4, -5])
    np.testing.assert_array_equal(one.versions, [1, 1])
    done = segments.finish(one, types.FinishReason.LENGTH, 'text')
    self.assertEqual(done.completion.admission_index, 5)
    self.assertEqual(done.completion.sample_index, 0)
    self.assertEqual(done.completion.text, 'text')


if __name__ == '__main__':
  absltest.main()
