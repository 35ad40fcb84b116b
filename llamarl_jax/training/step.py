"""One update: log-probs, loss sums over micro-batches, gradient, optimizer.

The objective is a `LossFn`; reinforcement and supervised learning differ in
nothing else. A loss is a sum with its count. Micro-batches add up both, and
one division follows by the count of the whole batch, so that the way a batch
is split has no influence on how its tokens are weighted.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from llamarl_jax.algorithms import log_probs as log_probs_lib
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.types import LossFn
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Mean
from llamarl_jax.types import Params
from llamarl_jax.types import TrainState
from llamarl_jax.types import Trajectories

TrainStepFn = Callable[
  [TrainState, Trajectories], tuple[TrainState, dict[str, jax.Array]]
]
# (params, batch) -> (log_probs f32[R, T], entropy f32[R, T])
PolicyFn = Callable[[Params, Trajectories], tuple[jax.Array, jax.Array]]


class _Update(NamedTuple):
  """What one optimizer update gave, beside the new parameters."""

  output: LossOutput
  grad_norm: jax.Array
  finite: jax.Array


# ((params, opt_state), batch) -> ((params, opt_state), facts)
UpdateFn = Callable[
  [tuple[Params, Any], Trajectories], tuple[tuple[Params, Any], _Update]
]


def policy_log_probs(
  config: config_lib.LlamaConfig,
  params: Params,
  batch: Trajectories,
  *,
  temperature: float,
  max_completion: int,
  remat: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """Returns log pi and the entropy of pi at completion tokens, f32[R, T] each.

  pi = softmax(logits / temperature), as it was sampled from. Both are 0
  outside the completion mask. Prompts are read but not scored: the output
  projection runs on `max_completion` places of each row.

  Args:
    config: of the model.
    params: tree as `llama.abstract_params` describes it.
    batch: rows of T tokens.
    temperature: above 0.
    max_completion: completion tokens that a row may hold. Those beyond it
      score NaN, so that the update is skipped rather than wrong.
    remat: whether to recompute layers in the backward pass to save memory.
  """
  mask = batch.completion_mask
  chex.assert_equal_shape([batch.tokens, mask])
  hidden = llama.hidden_states(
    config,
    params,
    batch.tokens,
    batch.positions,
    batch.segment_ids,
    prefix_ids=batch.prefix_ids,
    remat=remat,
  )
  size = min(max_completion, mask.shape[1])
  # A stable sort of the inverted mask lists completion tokens first, in order.
  places = jnp.argsort(~mask, axis=1, stable=True)[:, :size]
  # Token t is predicted by what was read up to the token before it.
  if batch.predecessors is None:
    before = jnp.maximum(places - 1, 0)
  else:
    before = jnp.take_along_axis(batch.predecessors, places, axis=1)
  hidden = jnp.take_along_axis(hidden, before[:, :, None], axis=1)
  targets = jnp.take_along_axis(batch.tokens, places, axis=1)
  logits = llama.logits(config, params, hidden)
  log_probs = log_probs_lib.token_log_probs(
    logits, targets, temperature=temperature
  )
  # A metric only: no gradient is taken of it.
  entropy = log_probs_lib.entropy(
    jax.lax.stop_gradient(logits), temperature=temperature
  )
  rank = jnp.cumsum(mask, axis=1) - 1

  def spread(values: jax.Array) -> jax.Array:
    index = jnp.clip(rank, 0, size - 1)
    spread_out = jnp.take_along_axis(values, index, axis=1)
    inside = jnp.where(rank < size, spread_out, jnp.nan)
    return jnp.where(mask, inside, 0.0)

  return spread(log_probs), spread(entropy)


def make_train_step(
  config: config_lib.LlamaConfig,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  *,
  temperature: float,
  max_completion: int,
  num_micro_batches: int = 1,
  num_minibatches: int = 1,
  recompute_proximal: bool = False,
  remat: bool = False,
  state_shardings: TrainState | None = None,
) -> TrainStepFn:
  """Returns a jitted (state, batch) -> (state, metrics); state is donated.

  An update whose loss or gradient is not finite leaves parameters and
  optimizer as they were and counts in `skipped_steps`; one without a single
  token to train on leaves them too. `batches_consumed` advances in any case.

  Rows are dealt out in strides: split i of n takes rows i, i + n, ... Each
  split of a batch whose rows are sharded then lies on all devices evenly.

  Metrics are those of the loss as means over the batch; and loss, entropy,
  completion_tokens (the loss's denominator), grad_norm (before clipping, mean
  over minibatches), step_skipped (updates skipped as not finite).

  Args:
    config: of the model.
    loss_fn: the objective.
    optimizer: see `optimizer.make_optimizer`.
    temperature: that of the sampler, above 0.
    max_completion: completion tokens that a row may hold.
    num_micro_batches: parts the gradient of an update is summed over in turn.
    num_minibatches: optimizer updates a batch, each on its share of the rows
      with its own denominator; more than one needs a loss that tolerates it.
    recompute_proximal: whether to give the loss `proximal_log_probs`, those of
      the parameters at the start of the batch. Implied by several minibatches.
    remat: see `policy_log_probs`.
    state_shardings: shardings of the new state, None = left to the compiler.

  Raises:
    ValueError: if a number is out of its range; when called, if the splits do
      not divide the rows of the batch.
  """
  for name, number in (
    ('num_micro_batches', num_micro_batches),
    ('num_minibatches', num_minibatches),
    ('max_completion', max_completion),
  ):
    if number < 1:
      raise ValueError(f'{name} must be at least 1, got {number}')
  if not temperature > 0:
    raise ValueError(
      f'temperature must be above 0 to train, got {temperature}: greedy '
      'completions have no log-probs to learn from'
    )
  policy = functools.partial(
    policy_log_probs,
    config,
    temperature=temperature,
    max_completion=max_completion,
    remat=remat,
  )
  update = functools.partial(
    _update,
    policy,
    loss_fn,
    optimizer,
    num_micro_batches,
    recompute_proximal and num_minibatches == 1,
    None if state_shardings is None else state_shardings.params,
  )
  return jax.jit(
    functools.partial(
      _train_step, policy, update, num_micro_batches, num_minibatches
    ),
    donate_argnums=0,
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _train_step(
  policy: PolicyFn,
  update: UpdateFn,
  num_micro_batches: int,
  num_minibatches: int,
  state: TrainState,
  batch: Trajectories,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Returns the state after all updates of a batch, and its metrics."""
  _check_rows(batch, num_micro_batches, num_minibatches)
  learned = (state.params, state.opt_state)
  if num_minibatches == 1:
    learned, result = update(learned, batch)
    results = jax.tree.map(lambda x: x[None], result)
  else:
    batch = _with_proximal(
      policy, state.params, batch, num_minibatches * num_micro_batches
    )
    learned, results = jax.lax.scan(
      update, learned, _split(batch, num_minibatches)
    )
  skipped = jnp.sum(~results.finite, dtype=jnp.int32)
  state = TrainState(
    params=learned[0],
    opt_state=learned[1],
    batches_consumed=state.batches_consumed + 1,
    skipped_steps=state.skipped_steps + skipped,
  )
  return state, _metrics(results, skipped)


def _update(
  policy: PolicyFn,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  num_micro_batches: int,
  fill_proximal: bool,
  param_shardings: Params | None,
  learned: tuple[Params, Any],
  batch: Trajectories,
) -> tuple[tuple[Params, Any], _Update]:
  """Returns parameters and optimizer state after one update, and its facts."""
  params, opt_state = learned

  def loss_sum(
    params: Params, micro_batch: Trajectories
  ) -> tuple[jax.Array, LossOutput]:
    log_probs, entropy = policy(params, micro_batch)
    if fill_proximal:
      # With one update a batch the proximal policy is the current one.
      fixed = jax.lax.stop_gradient(log_probs)
      micro_batch = dataclasses.replace(micro_batch, proximal_log_probs=fixed)
    loss, metrics = loss_fn(log_probs, micro_batch)
    count = jnp.sum(micro_batch.completion_mask, dtype=jnp.float32)
    metrics = {**metrics, 'entropy': Mean(jnp.sum(entropy), count)}
    return loss.total, LossOutput(loss, metrics)

  if num_micro_batches == 1:
    # The count is known after the forward pass: dividing what is propagated
    # backward spares a pass over all gradients.
    _, pull_back, output = jax.vjp(
      lambda p: loss_sum(p, batch), params, has_aux=True
    )
    (grads,) = pull_back(_inverse(output.loss.count))
  else:
    grads, output = _accumulate(loss_sum, params, batch, num_micro_batches)
    scale = _inverse(output.loss.count)
    grads = jax.tree.map(lambda g: g * scale, grads)
  if param_shardings is not None:
    grads = jax.lax.with_sharding_constraint(grads, param_shardings)
  grad_norm = optax.tree.norm(grads)
  finite = jnp.isfinite(output.loss.total) & jnp.isfinite(grad_norm)
  # A reduction may count rows, also those without a token to train on.
  has_tokens = output.metrics['entropy'].count > 0
  applied = finite & (output.loss.count > 0) & has_tokens
  updates, new_opt_state = optimizer.update(grads, opt_state, params)
  new = (optax.apply_updates(params, updates), new_opt_state)
  learned = jax.tree.map(
    lambda after, before: jnp.where(applied, after, before), new, learned
  )
  return learned, _Update(output, grad_norm, finite)


def _inverse(count: jax.Array) -> jax.Array:
  """Returns 1 / count, and 0 for a count of 0."""
  count = jnp.asarray(count, jnp.float32)
  return jnp.where(count > 0, 1.0 / jnp.where(count > 0, count, 1.0), 0.0)


def _accumulate(
  loss_sum: Callable[[Params, Trajectories], tuple[jax.Array, LossOutput]],
  params: Params,
  batch: Trajectories,
  num_micro_batches: int,
) -> tuple[Params, LossOutput]:
  """Returns gradients and loss sums added over micro-batches."""
  grad_fn = jax.grad(loss_sum, has_aux=True)

  def add(
    grads: Params, micro_batch: Trajectories
  ) -> tuple[Params, LossOutput]:
    more, output = grad_fn(params, micro_batch)
    return jax.tree.map(jnp.add, grads, more), output

  zeros = jax.tree.map(jnp.zeros_like, params)
  grads, outputs = jax.lax.scan(add, zeros, _split(batch, num_micro_batches))
  return grads, jax.tree.map(lambda x: jnp.sum(x, axis=0), outputs)


def _with_proximal(
  policy: PolicyFn, params: Params, batch: Trajectories, num_splits: int
) -> Trajectories:
  """Returns the batch with the log-probs of the policy it starts from."""
  parts = jax.lax.map(
    lambda part: policy(params, part)[0], _split(batch, num_splits)
  )
  log_probs = parts.swapaxes(0, 1).reshape(batch.tokens.shape)
  return dataclasses.replace(batch, proximal_log_probs=log_probs)


def _split(batch: Trajectories, num_splits: int) -> Trajectories:
  """Returns the batch as [num_splits, R / num_splits, T], dealt in strides."""

  def deal(x: jax.Array) -> jax.Array:
    # Row-sharded arrays stay where they are: a device deals out its own rows.
    return x.reshape(-1, num_splits, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(deal, batch)


def _check_rows(
  batch: Trajectories, num_micro_batches: int, num_minibatches: int
) -> None:
  rows = batch.tokens.shape[0]
  if rows % (num_micro_batches * num_minibatches):
    raise ValueError(
      f'{rows} rows cannot be split into num_minibatches = {num_minibatches} '
      f'times num_micro_batches = {num_micro_batches} equal parts: choose '
      'numbers whose product divides the rows'
    )


def _metrics(results: _Update, skipped: jax.Array) -> dict[str, jax.Array]:
  """Returns f32 scalars from results stacked over the minibatches."""
  output = jax.tree.map(lambda x: jnp.sum(x, axis=0), results.output)
  values = {name: mean.value() for name, mean in output.metrics.items()}
  values |= {
    'loss': output.loss.value(),
    'completion_tokens': output.metrics['entropy'].count,
    'grad_norm': jnp.mean(results.grad_norm),
    'step_skipped': skipped,
  }
  return {name: jnp.float32(value) for name, value in values.items()}
