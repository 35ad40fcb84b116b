from absl.testing import absltest
from absl.testing import parameterized
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import segments

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


def _pack(*assignments, num_slots=8):
  return segments.pack(
    [segments.Assignment(*a) for a in assignments],
    num_slots=num_slots,
    max_prompt=3,
    max_new=4,
  )


class SegmentsTest(parameterized.TestCase):
  def test_packs_each_prompt_once(self):
    first = _request(7)
    other = _request(7, (3, 4, 3), types.Stream.EVALUATION, temperature=0.0)
    third = _request(9, (2,), max_new_tokens=1)
    filling = _pack(
      (first, 0, 4), (other, 0, 2), (first, 1, 5), (third, 1, 0), (other, 1, 1)
    )
    np.testing.assert_array_equal(
      filling.prompts, [[1, 2, 0], [3, 4, 3], [2, 0, 0], [0, 0, 0]]
    )
    np.testing.assert_array_equal(filling.prompt_lengths, [2, 3, 1, 1])
    np.testing.assert_array_equal(filling.source_rows[:5], [0, 1, 0, 2, 1])
    # Padded to a power of two with a slot that does not exist.
    np.testing.assert_array_equal(filling.slots, [4, 2, 5, 0, 1, 8, 8, 8])
    np.testing.assert_array_equal(filling.admission[:5], [7, 7, 7, 9, 7])
    np.testing.assert_array_equal(filling.sample[:5], [0, 0, 1, 1, 1])
    np.testing.assert_array_equal(filling.stream[:5], [0, 1, 0, 0, 1])
    np.testing.assert_array_equal(filling.temperature[:5], [1, 0, 1, 1, 0])
    np.testing.assert_array_equal(filling.max_new[:5], [4, 4, 4, 1, 4])

  @parameterized.named_parameters(
    ('empty_prompt', _request(1, ()), 'Request 1 has a prompt of 0 tokens'),
    ('long_prompt', _request(1, [1] * 4), 'prompt of 4 tokens.*hold 1 to 3'),
    (
      'many_new',
      _request(1, max_new_tokens=5),
      'up to 5 new tokens.*hold 1 to 4, 7 tokens with the prompt',
    ),
    ('none_new', _request(1, max_new_tokens=0), 'up to 0 new tokens'),
    ('temperature', _request(1, temperature=-1.0), 'temperature -1.0'),
  )
  def test_refuses_a_request_that_does_not_fit(self, request, message):
    with self.assertRaisesRegex(ValueError, message):
      _pack((request, 0, 0))

  def test_refuses_wrong_slots(self):
    with self.assertRaisesRegex(ValueError, 'Slot 8 does not exist'):
      _pack((_request(1), 0, 8))
    with self.assertRaisesRegex(ValueError, 'assigned twice'):
      _pack((_request(1), 0, 3), (_request(1), 1, 3))
    with self.assertRaisesRegex(ValueError, '0 assignments'):
      _pack()

  def test_harvests_what_is_finished(self):
    state = decoding.init_state(_CONFIG, 3, 3, 4).replace(
      finish=np.array([decoding.FULL, decoding.RUNNING, decoding.STOPPED]),
      num_new=np.array([4, 2, 1]),
      tokens=np.arange(12).reshape(3, 4),
      log_probs=-np.arange(12.0).reshape(3, 4),
      versions=np.ones((3, 4), np.int32),
      stream=np.array([0, 0, 1]),
      admission=np.array([5, 6, 7]),
      sample=np.array([0, 1, 2]),
    )
    stopped, full = segments.harvest(state, [2, 1, 0])
    self.assertEqual(stopped[:4], (2, types.Stream.EVALUATION, 7, 2))
    self.assertEqual(stopped.finish_reason, types.FinishReason.STOP)
    np.testing.assert_array_equal(stopped.tokens, [8])
    self.assertEqual(full[:4], (0, types.Stream.TRAIN, 5, 0))
    self.assertEqual(full.finish_reason, types.FinishReason.LENGTH)
    np.testing.assert_array_equal(full.log_probs, [0, -1, -2, -3])
    np.testing.assert_array_equal(full.versions, [1, 1, 1, 1])


if __name__ == '__main__':
  absltest.main()
