"""Log-probs of completion tokens against the plain way to score."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np

from llamarl_jax.training import batching
from llamarl_jax.training import scoring
from tests.oracles import plain_scoring


@functools.cache
def _jitted_log_probs(max_completion):
  return jax.jit(
    functools.partial(
      scoring.policy_log_probs,
      plain_scoring.CONFIG,
      temperature=plain_scoring.TEMPERATURE,
      max_completion=max_completion,
    )
  )


class PolicyLogProbsTest(parameterized.TestCase):
  @parameterized.parameters(5, 100)
  def test_equals_full_logits(self, max_completion):
    batch = plain_scoring.batch()
    log_probs, entropy = _jitted_log_probs(max_completion)(
      plain_scoring.params(), batch
    )
    expected = jax.jit(plain_scoring.log_probs_and_entropy)(
      plain_scoring.params(), batch
    )
    # Sums of 16 products in another order: a few float32 roundings.
    chex.assert_trees_all_close((log_probs, entropy), expected, atol=1e-5)
    self.assertTrue(np.all(np.asarray(log_probs)[~batch.completion_mask] == 0))
    self.assertTrue(np.all(np.asarray(log_probs)[batch.completion_mask] < 0))

  def test_packed_rows_score_as_single_ones(self):
    """Two sequences in one row, each with its own segment and positions."""
    single = plain_scoring.batch()
    lengths = [
      p + c
      for p, c in zip(
        plain_scoring.PROMPT_LENGTHS,
        plain_scoring.COMPLETION_LENGTHS,
        strict=True,
      )
    ]
    packed = batching.empty_rows(4, 16, pad_token=0)
    for row in range(4):
      start = 0
      for segment, source in enumerate((row, row + 4), start=1):
        stop = start + lengths[source]
        take = slice(0, lengths[source])
        packed.tokens[row, start:stop] = single.tokens[source, take]
        packed.completion_mask[row, start:stop] = single.completion_mask[
          source, take
        ]
        packed.positions[row, start:stop] = single.positions[source, take]
        packed.segment_ids[row, start:stop] = segment
        start = stop
    apart = np.asarray(_jitted_log_probs(5)(plain_scoring.params(), single)[0])
    together = np.asarray(
      _jitted_log_probs(10)(plain_scoring.params(), packed)[0]
    )
    for row in range(4):
      expected = np.concatenate(
        [apart[s, : lengths[s]] for s in (row, row + 4)]
      )
      np.testing.assert_allclose(
        together[row, : expected.size], expected, atol=1e-5
      )

  def test_completions_beyond_the_limit_do_not_pass_silently(self):
    log_probs, _ = _jitted_log_probs(4)(
      plain_scoring.params(), plain_scoring.batch()
    )
    lost = np.isnan(log_probs)
    # Two rows have five completion tokens: the fifth of each has no place.
    np.testing.assert_array_equal(np.argwhere(lost), [[0, 5], [5, 5]])


if __name__ == '__main__':
  absltest.main()
