from absl.testing import absltest
from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import inference
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import slots as slots_lib
from tests.oracles import tiny_slots


class SlotsTest(parameterized.TestCase):
  def test_a_completion_resumed_elsewhere_ends_the_same(self):
    """Its prompt and first tokens are read again, in another slot."""
    expected = tiny_slots.generate([(2, 1)], 3, tiny_slots.MAX_NEW)[2, 1]
    address = expected.admission, expected.sample
    self.assertGreater(len(expected.tokens), 3)
    prompt = tiny_slots.prompt(address[0])
    known = np.concatenate([prompt, expected.tokens[:3]]).astype(np.int32)
    read = len(known) - 1
    wide = np.zeros((1, 8), np.int32)
    wide[0, :read] = known[:read]
    # A slot that was in use, and is let go, is put to use again.
    state = slots_lib.release(
      tiny_slots.fill(tiny_slots.empty(3), [(5, 0, 1)]), jnp.array([1, 3])
    )
    self.assertFalse(np.any(state.active))
    one = np.array([1], np.int32)
    state = state.replace(
      cache=decoding.prefill_chunk(
        tiny_slots.CONFIG,
        tiny_slots.params(),
        state.cache,
        inference.PromptChunk(wide, 0 * one, read * one, one),
        read_length=0,
      )
    )

    def first_three(values):
      row = np.zeros((1, tiny_slots.MAX_NEW), values.dtype)
      row[0, :3] = values[:3]
      return row

    resumed = slots_lib.Resumed(
      slots=one,
      prompt_length=len(prompt) * one,
      last_token=known[-1:],
      num_new=3 * one,
      tokens=first_three(expected.tokens),
      log_probs=first_three(expected.log_probs),
      versions=first_three(np.full(3, 4, np.int32)),
      admission=address[0] * one,
      sample=address[1] * one,
      stream=int(types.Stream.TRAIN) * one,
      temperature=np.ones(1, np.float32),
      top_k=0 * one,
      top_p=np.ones(1, np.float32),
      min_p=np.zeros(1, np.float32),
      min_new=0 * one,
      max_new=tiny_slots.MAX_NEW * one,
    )
    state = tiny_slots.segment(
      slots_lib.resume_slots(state, resumed), version=6
    )
    (found,) = tiny_slots.harvest(state, [1]).values()
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.log_probs, expected.log_probs, atol=2e-5)
    more = len(expected.tokens) - 3
    np.testing.assert_array_equal(
      state.versions[1, : 3 + more], [4, 4, 4] + [6] * more
    )


if __name__ == '__main__':
  absltest.main()
