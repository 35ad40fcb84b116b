"""One row a group against one row a sequence: the same numbers."""

import functools

from absl.testing import parameterized
import chex
import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.training import batching
from llamarl_jax.training import packing
from llamarl_jax.training import scoring

_CONFIG = config_lib.LlamaConfig(
  vocab_size=11,
  width=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=24,
  rope_theta=1e4,
)
# Prompts and completions of unequal length; a one-token prompt, a one-token
# completion, and a completion that is missing.
_PROMPTS = (3, 1)
_COMPLETIONS = ((4, 1, 2), (2, 5))


def _groups():
  rng = np.random.default_rng(0)
  groups = []
  for n, (prompt, lengths) in enumerate(
    zip(_PROMPTS, _COMPLETIONS, strict=True)
  ):
    completions = tuple(
      types.Completion(
        admission_index=n,
        sample_index=g,
        tokens=rng.integers(11, size=length).astype(np.int32),
        log_probs=rng.uniform(-3, -1, length).astype(np.float32),
        versions=np.full(length, g, np.int32),
        finish_reason=types.FinishReason.LENGTH,
        text='',
      )
      for g, length in enumerate(lengths)
    )
    request = types.Request(
      admission_index=n,
      stream=types.Stream.TRAIN,
      problem=types.Problem(n, '', ''),
      prompt_tokens=tuple(rng.integers(11, size=prompt).tolist()),
      num_samples=3,
      temperature=1.0,
      max_new_tokens=5,
    )
    groups.append(types.Group(request, completions))
  return groups


# Two rows, each with a part of either group.
_SPLIT = [
  [packing.Part(1, (0,)), packing.Part(0, (1, 2))],
  [packing.Part(0, (0,)), packing.Part(1, (1,))],
]


def _rows(share_prompts, length=14, plan=None):
  advantages = np.float32([[0.5, -1.0, 0.25], [1.0, -2.0, 0.0]])
  return batching.build_trajectories(
    _groups(),
    advantages,
    row_length=length,
    pad_token=0,
    share_prompts=share_prompts,
    plan=plan,
  )


@functools.cache
def _params():
  return jax.jit(llama.init_params, static_argnums=0)(
    _CONFIG, jax.random.key(0)
  )


_score = jax.jit(
  functools.partial(
    scoring.policy_log_probs, _CONFIG, temperature=0.7, max_completion=11
  )
)


def _scored(values, rows):
  """Returns the values of completion tokens, in the order of the groups."""
  return np.asarray(values)[np.asarray(rows.completion_mask)]


class SharedPromptsTest(parameterized.TestCase):
  def test_layout(self):
    rows = _rows(share_prompts=True, length=11)
    np.testing.assert_array_equal(
      rows.segment_ids,
      [[1, 1, 1, 2, 2, 2, 2, 3, 4, 4, 0], [1, 2, 2, 3, 3, 3, 3, 3, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
      rows.positions,
      [[0, 1, 2, 3, 4, 5, 6, 3, 3, 4, 0], [0, 1, 2, 1, 2, 3, 4, 5, 0, 0, 0]],
    )
    np.testing.assert_array_equal(
      rows.prefix_ids,
      [[0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]],
    )
    # The first token of each completion follows the last of the prompt.
    np.testing.assert_array_equal(
      rows.predecessors[:, :9],
      [[0, 0, 1, 2, 3, 4, 5, 2, 2], [0, 0, 1, 0, 3, 4, 5, 6, 7]],
    )
    self.assertEqual(
      batching.row_length(_groups(), 1, share_prompts=True), 3 + 4 + 1 + 2
    )
    self.assertEqual(batching.row_length(_groups(), 1), 3 + 4)

  def test_log_probs_are_those_of_separate_rows(self):
    shared, apart = _rows(True), _rows(False)
    for ours, theirs in zip(
      _score(_params(), shared), _score(_params(), apart), strict=True
    ):
      np.testing.assert_allclose(
        _scored(ours, shared), _scored(theirs, apart), atol=1e-5
      )

  @parameterized.parameters('token', 'sequence', 'constant')
  def test_loss_and_gradient_are_those_of_separate_rows(self, reduction):
    loss_fn = registry.make_loss(
      'aipo',
      max_importance_ratio=2.0,
      clip_low=0.2,
      clip_high=0.2,
      reduction=reduction,
      constant_length=5,
    )

    def loss(params, rows):
      log_probs, _ = scoring.policy_log_probs(
        _CONFIG, params, rows, temperature=1.0, max_completion=11
      )
      output = loss_fn(log_probs, rows)
      return output.loss.total, output.loss.count

    grad = jax.jit(jax.grad(loss, has_aux=True))
    theirs, their_count = grad(_params(), _rows(False))
    for plan in (None, _SPLIT):
      ours, our_count = grad(_params(), _rows(True, plan=plan))
      self.assertEqual(our_count, their_count)
      chex.assert_trees_all_close(ours, theirs, atol=1e-5)

  def test_a_completion_does_not_see_its_siblings(self):
    rows = _rows(True)
    before, _ = _score(_params(), rows)
    changed = rows.replace(tokens=rows.tokens.copy())
    first = rows.segment_ids == 2
    changed.tokens[first] = (changed.tokens[first] + 1) % 11
    after, _ = _score(_params(), changed)
    others = (rows.segment_ids > 2) & rows.completion_mask
    np.testing.assert_array_equal(
      np.asarray(before)[others], np.asarray(after)[others]
    )
    self.assertTrue(
      np.all(np.asarray(before)[first] != np.asarray(after)[first])
    )
