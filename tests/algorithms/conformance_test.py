"""What every loss must do, whatever it optimizes.

A new loss is under the suite as soon as it is in `registry.LOSSES`.
"""

import dataclasses
import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax.algorithms import baselines
from llamarl_jax.algorithms import registry
from llamarl_jax.types import Trajectories

_DEFAULTS = {
  'max_importance_ratio': 2.0,
  'clip_low': 0.2,
  'clip_high': 0.3,
  'constant_length': 5,
}
# Every loss as it comes, and one loss with each of the other choices.
_CASES = {
  **{name: {'name': name} for name in registry.LOSSES},
  'aipo_sequence': {'name': 'aipo', 'reduction': 'sequence'},
  'aipo_constant': {'name': 'aipo', 'reduction': 'constant'},
  'aipo_k1': {'name': 'aipo', 'kl_estimator': 'k1', 'kl_coefficient': 0.1},
  'grpo_k2': {'name': 'grpo', 'kl_estimator': 'k2', 'kl_coefficient': 0.1},
  'ppo_k3': {'name': 'ppo', 'kl_estimator': 'k3', 'kl_coefficient': 0.1},
}
_every_loss = parameterized.named_parameters((case, case) for case in _CASES)

# Lengths of prompt and completion of six sequences, one a row; the last has no
# completion token.
_LENGTHS = ((1, 3), (2, 1), (1, 2), (3, 5), (2, 2), (4, 0))
_WIDTH = 8


@functools.cache
def _loss_fn(case):
  return registry.make_loss(**{**_DEFAULTS, **_CASES[case]})


@functools.cache
def _random_batch():
  """Returns log-probs and a batch, one sequence a row, NaN in the padding."""
  rng = np.random.default_rng(0)
  shape = (len(_LENGTHS), _WIDTH)
  mask = np.zeros(shape, bool)
  segment_ids = np.zeros(shape, np.int32)
  for row, (prompt, completion) in enumerate(_LENGTHS):
    segment_ids[row, : prompt + completion] = 1
    mask[row, prompt : prompt + completion] = True

  def values(scale):
    numbers = rng.normal(scale=scale, size=shape) - 2.0
    return jnp.asarray(np.where(mask, numbers, np.nan), jnp.float32)

  log_probs = values(1.0)
  return log_probs, Trajectories(
    tokens=jnp.asarray(rng.integers(0, 9, shape), jnp.int32),
    completion_mask=jnp.asarray(mask),
    segment_ids=jnp.asarray(segment_ids),
    positions=jnp.zeros(shape, jnp.int32),
    behavior_log_probs=values(1.0),
    policy_version=jnp.zeros(shape, jnp.int32),
    advantages=values(1.0) + 2.0,
    reference_log_probs=values(1.0),
    proximal_log_probs=values(1.0),
  )


def _evaluate(loss_fn, log_probs, batch):
  """Returns the gradient of the summed loss, and the output."""

  def total(log_probs):
    output = loss_fn(log_probs, batch)
    return output.loss.total, output

  return jax.grad(total, has_aux=True)(log_probs)


@functools.cache
def _results(case):
  """Returns what `_evaluate` gives for the random batch, not compiled."""
  return _evaluate(_loss_fn(case), *_random_batch())


@functools.cache
def _jitted_results():
  """Returns what `_evaluate` gives for each case, compiled as one program."""

  @jax.jit
  def evaluate_all(log_probs, batch):
    return {
      case: _evaluate(_loss_fn(case), log_probs, batch) for case in _CASES
    }

  return evaluate_all(*_random_batch())


def _map(function, log_probs, batch):
  """Applies `function` to every array."""
  return function(log_probs), jax.tree.map(function, batch)


def _assert_close(actual, expected, rtol=1e-5, atol=1e-6):
  chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=atol)


class ConformanceTest(chex.TestCase):
  @_every_loss
  def test_padding_is_not_read(self, case):
    gradient, output = _results(case)
    chex.assert_tree_all_finite((gradient, output))

    log_probs, batch = _random_batch()
    mask = batch.completion_mask
    np.testing.assert_array_equal(jnp.where(mask, 0.0, gradient), 0.0)

    def fill(array):
      if array.dtype != jnp.float32:
        return array
      return jnp.where(mask, array, 0.5)

    filled = _evaluate(_loss_fn(case), *_map(fill, log_probs, batch))
    chex.assert_trees_all_equal((gradient, output), filled)

  @_every_loss
  def test_more_padding_changes_nothing(self, case):
    log_probs, batch = _random_batch()
    gradient, output = _results(case)

    def pad(array):
      fill = jnp.nan if array.dtype == jnp.float32 else 0
      return jnp.pad(array, ((0, 2), (0, 3)), constant_values=fill)

    padded_gradient, padded = _evaluate(
      _loss_fn(case), *_map(pad, log_probs, batch)
    )
    _assert_close(padded, output)
    np.testing.assert_array_equal(padded_gradient[:6, :_WIDTH], gradient)
    np.testing.assert_array_equal(padded_gradient[6:], 0.0)

  @_every_loss
  def test_order_of_rows_does_not_matter(self, case):
    log_probs, batch = _random_batch()
    gradient, output = _results(case)
    order = np.asarray([3, 5, 0, 2, 4, 1])
    moved_gradient, moved = _evaluate(
      _loss_fn(case), *_map(lambda array: array[order], log_probs, batch)
    )
    _assert_close(moved, output)
    np.testing.assert_array_equal(moved_gradient, gradient[order])

  @_every_loss
  def test_micro_batches_add_up(self, case):
    log_probs, batch = _random_batch()
    gradient, output = _results(case)
    # Of one row each, the last without a completion token.
    parts = [
      _evaluate(
        _loss_fn(case),
        *_map(lambda array, row=row: array[row : row + 1], log_probs, batch),
      )
      for row in range(len(_LENGTHS))
    ]
    np.testing.assert_array_equal(
      jnp.concatenate([part_gradient for part_gradient, _ in parts]), gradient
    )
    summed = jax.tree.map(lambda *leaves: sum(leaves), *(p for _, p in parts))
    _assert_close(summed, output)
    self.assertEqual(summed.loss.count, output.loss.count)

  @_every_loss
  def test_packed_rows_equal_unpacked_rows(self, case):
    log_probs, batch = _random_batch()
    gradient, output = _results(case)
    # Two rows hold two sequences each, which leaves the last two empty.
    rows = ((0, 1), (2, 5), (3,), (4,), (), ())

    def pack(array):
      fill = jnp.nan if array.dtype == jnp.float32 else 0
      packed = np.full((len(rows), _WIDTH), fill, array.dtype)
      for row, sequences in enumerate(rows):
        start = 0
        for sequence in sequences:
          length = sum(_LENGTHS[sequence])
          packed[row, start : start + length] = array[sequence, :length]
          start += length
      return packed

    packed_log_probs, packed_batch = _map(pack, log_probs, batch)
    segment_ids = np.zeros((len(rows), _WIDTH), np.int32)
    for row, sequences in enumerate(rows):
      start = 0
      for place, sequence in enumerate(sequences):
        length = sum(_LENGTHS[sequence])
        segment_ids[row, start : start + length] = place + 1
        start += length
    packed_gradient, packed_output = _evaluate(
      _loss_fn(case),
      jnp.asarray(packed_log_probs),
      dataclasses.replace(packed_batch, segment_ids=segment_ids),
    )
    _assert_close(packed_output, output)
    self.assertEqual(packed_output.loss.count, output.loss.count)
    np.testing.assert_array_equal(
      packed_gradient[packed_batch.completion_mask],
      pack(gradient)[packed_batch.completion_mask],
    )

  @_every_loss
  def test_all_masked_gives_zero(self, case):
    log_probs, batch = _random_batch()
    batch = dataclasses.replace(
      batch, completion_mask=jnp.zeros_like(batch.completion_mask)
    )
    gradient, output = _evaluate(_loss_fn(case), log_probs, batch)
    np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
    for mean in (output.loss, *output.metrics.values()):
      self.assertEqual(mean, (0.0, 0.0))
      self.assertEqual(mean.value(), 0.0)

  @parameterized.named_parameters(
    # The gradient of k1 is not 0 where the policy is the reference.
    (case, case)
    for case in _CASES
    if case != 'aipo_k1'
  )
  def test_on_policy_gradient_is_that_of_reinforce(self, case):
    log_probs, batch = _random_batch()
    settings = _CASES[case]
    for proximal_log_probs in (log_probs, None):
      on_policy = dataclasses.replace(
        batch,
        behavior_log_probs=log_probs,
        reference_log_probs=log_probs,
        proximal_log_probs=proximal_log_probs,
      )
      gradient, output = _evaluate(_loss_fn(case), log_probs, on_policy)
      reduction = settings.get(
        'reduction', 'sequence' if 'grpo' in settings['name'] else 'token'
      )
      expected, reference = _evaluate(
        lambda log_probs, batch, reduction=reduction: baselines.reinforce_loss(
          log_probs,
          batch,
          reduction_fn=registry.make_reduction(reduction, constant_length=5),
        ),
        log_probs,
        on_policy,
      )
      np.testing.assert_allclose(gradient, expected, rtol=1e-6)
      self.assertEqual(output.loss.count, reference.loss.count)
      self.assertEqual(output.metrics['importance_ratio'].value(), 1.0)
      self.assertEqual(output.metrics['log_prob_gap'].value(), 0.0)
      self.assertEqual(output.metrics['behavior_kl'].value(), 0.0)

  @_every_loss
  def test_jitted_equals_not_jitted(self, case):
    _assert_close(_jitted_results()[case], _results(case))

  @_every_loss
  def test_far_policies_do_not_overflow(self, case):
    log_probs, batch = _random_batch()
    sign = jnp.where(jnp.arange(_WIDTH) % 2 == 0, 1.0, -1.0)[None, :]
    for shift in (1e4, -1e4):
      far = log_probs + shift * sign
      result = _evaluate(
        _loss_fn(case),
        log_probs,
        dataclasses.replace(
          batch,
          behavior_log_probs=far,
          proximal_log_probs=log_probs - shift * sign,
          reference_log_probs=far,
        ),
      )
      chex.assert_tree_all_finite(result)

  @_every_loss
  def test_metrics_and_denominator_are_constants(self, case):
    log_probs, batch = _random_batch()

    def constants(log_probs):
      loss, metrics = _loss_fn(case)(log_probs, batch)
      return loss.count + sum(mean.total for mean in metrics.values())

    np.testing.assert_array_equal(
      jax.grad(constants)(log_probs), np.zeros(log_probs.shape)
    )

  @_every_loss
  def test_nan_of_a_real_token_shows(self, case):
    log_probs, batch = _random_batch()
    broken = log_probs.at[0, 1].set(jnp.nan)
    _, output = _evaluate(_loss_fn(case), broken, batch)
    self.assertTrue(jnp.isnan(output.loss.total))
