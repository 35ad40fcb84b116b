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

import jax
import jax.numpy as jnp
import optax

from llamarl_jax.algorithms import importance
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import lora
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import offload
from llamarl_jax.training import scoring
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
# rows of an update -> its micro-batches
CountFn = Callable[[int], int]


class _Update(NamedTuple):
  """What one optimizer update gave, beside the new parameters."""

  output: LossOutput
  grad_norm: jax.Array
  finite: jax.Array


# (frozen, version of the batch, (trainable, opt_state), batch) ->
# ((trainable, opt_state), facts)
UpdateFn = Callable[
  [Params, jax.Array, tuple[Params, Any], Trajectories],
  tuple[tuple[Params, Any], _Update],
]


def make_train_step(
  config: config_lib.LlamaConfig,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  *,
  temperature: float,
  max_completion: int,
  num_micro_batches: int | CountFn = 1,
  num_minibatches: int = 1,
  recompute_proximal: bool = False,
  computation: scoring.Computation = scoring.DEFAULT,
  state_shardings: TrainState | None = None,
) -> TrainStepFn:
  """Returns a jitted (state, batch) -> (state, metrics); state is donated.

  An update whose loss or gradient is not finite leaves parameters and
  optimizer as they were and counts in `skipped_steps`; one without a single
  token to train on leaves them too. `batches_consumed` advances in any case.

  Rows are dealt out in strides: split i of n takes rows i, i + n, ... Each
  split of a batch whose rows are sharded then lies on all devices evenly.

  Metrics are those of the loss as means over the batch, log_prob_gap also over
  the tokens of the version trained (`importance.fresh_metrics`); loss, entropy,
  completion_tokens (the loss's denominator), grad_norm (before clipping, mean
  over minibatches), step_skipped (updates skipped as not finite).

  Args:
    config: of the model.
    loss_fn: the objective.
    optimizer: see `optimizer.make_optimizer`.
    temperature: that of the sampler, above 0.
    max_completion: completion tokens that a row may hold.
    num_micro_batches: parts of an update, in turn; or a function of its rows.
    num_minibatches: optimizer updates a batch, each on its share of the rows
      with its own denominator; more than one needs a loss that tolerates it.
    recompute_proximal: whether to give the loss `proximal_log_probs`, those of
      the parameters at the start of the batch. Implied by several minibatches.
    computation: see `scoring.Computation`.
    state_shardings: shardings of the new state, None = left to the compiler.

  Raises:
    ValueError: if a number is out of its range; when called, if the splits do
      not divide the rows of the batch.
  """
  _check_numbers(
    temperature,
    num_micro_batches=num_micro_batches,
    num_minibatches=num_minibatches,
    max_completion=max_completion,
  )
  count_fn = functools.partial(_count, num_micro_batches)
  policy = functools.partial(
    scoring.policy_log_probs,
    config,
    temperature=temperature,
    max_completion=max_completion,
    computation=computation,
  )
  update = functools.partial(
    _update,
    policy,
    loss_fn,
    optimizer,
    count_fn,
    recompute_proximal and num_minibatches == 1,
    None
    if state_shardings is None
    else lora.split_trainable(state_shardings.params)[0],
  )
  train_step = functools.partial(
    _train_step, policy, update, count_fn, num_minibatches, state_shardings
  )
  return jax.jit(
    _on_mesh(train_step, state_shardings),
    donate_argnums=0,
    out_shardings=None if state_shardings is None else (state_shardings, None),
  )


def _on_mesh(step: TrainStepFn, shardings: TrainState | None) -> TrainStepFn:
  """Returns the step with activations laid out as the state is."""
  if shardings is None:
    return step
  replicated: Any = shardings.batches_consumed
  return activations.on_mesh(step, replicated.mesh)


def _count(number: int | CountFn, rows: int) -> int:
  """Returns the micro-batches of an update of so many rows."""
  return number(rows) if callable(number) else number


def _check_numbers(temperature: float, **numbers: int | CountFn) -> None:
  for name, number in numbers.items():
    if not callable(number) and number < 1:
      raise ValueError(f'{name} must be at least 1, got {number}')
  if not temperature > 0:
    raise ValueError(
      f'temperature must be above 0 to train, got {temperature}: greedy '
      'completions have no log-probs to learn from'
    )


def _train_step(
  policy: PolicyFn,
  update_fn: UpdateFn,
  count_fn: CountFn,
  num_minibatches: int,
  shardings: TrainState | None,
  state: TrainState,
  batch: Trajectories,
) -> tuple[TrainState, dict[str, jax.Array]]:
  """Returns the state after all updates of a batch, and its metrics."""
  num_micro_batches = count_fn(len(batch.tokens) // num_minibatches)
  _check_rows(batch, num_micro_batches, num_minibatches)
  opt_state = state.opt_state
  if shardings is not None:
    opt_state = offload.on_devices(opt_state, shardings.opt_state)
  # Frozen weights are constants of the update: no gradient of them is taken.
  trainable, frozen = lora.split_trainable(state.params)

  def update(
    learned: tuple[Params, Any], batch: Trajectories
  ) -> tuple[tuple[Params, Any], _Update]:
    return update_fn(frozen, state.batches_consumed, learned, batch)

  learned = (trainable, opt_state)
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
    params=lora.combine(learned[0], frozen),
    opt_state=learned[1],
    batches_consumed=state.batches_consumed + 1,
    skipped_steps=state.skipped_steps + skipped,
  )
  return state, _metrics(results, skipped)


def _update(
  policy: PolicyFn,
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  count_fn: CountFn,
  fill_proximal: bool,
  param_shardings: Params | None,
  frozen: Params,
  version: jax.Array,
  learned: tuple[Params, Any],
  batch: Trajectories,
) -> tuple[tuple[Params, Any], _Update]:
  """Returns parameters and optimizer state after one update, and its facts."""
  params, opt_state = learned

  def loss_sum(
    params: Params, micro_batch: Trajectories
  ) -> tuple[jax.Array, LossOutput]:
    whole = lora.combine(params, frozen)
    log_probs, entropy = policy(whole, micro_batch)
    if fill_proximal:
      # With one update a batch the proximal policy is the current one.
      fixed = jax.lax.stop_gradient(log_probs)
      micro_batch = dataclasses.replace(micro_batch, proximal_log_probs=fixed)
    loss, metrics = loss_fn(log_probs, micro_batch)
    count = jnp.sum(micro_batch.completion_mask, dtype=jnp.float32)
    metrics = {**metrics, 'entropy': Mean(jnp.sum(entropy), count)}
    if 'log_prob_gap' in metrics:
      metrics |= _fresh_metrics(log_probs, micro_batch, version)
    return loss.total, LossOutput(loss, metrics)

  num_micro_batches = count_fn(len(batch.tokens))
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


def _fresh_metrics(
  log_probs: jax.Array, batch: Trajectories, version: jax.Array
) -> dict[str, Mean]:
  """Returns the gap on tokens that the policy of this version sampled."""
  # Behind the first of several updates the policy is no longer that one.
  start = batch.proximal_log_probs
  return importance.fresh_metrics(
    log_probs if start is None else start,
    batch.behavior_log_probs,
    batch.completion_mask,
    batch.policy_version == version,
  )


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
