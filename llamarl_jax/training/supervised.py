"""Supervised learning on given completions, with the same train step.

It warms up a model that starts from random parameters: a policy that never
finds a right answer has nothing to be reinforced.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from llamarl_jax.models import config as config_lib
from llamarl_jax.training import batching
from llamarl_jax.training import packing
from llamarl_jax.training import step
from llamarl_jax.types import LossOutput
from llamarl_jax.types import Mean
from llamarl_jax.types import Trajectories


def supervised_loss(log_probs: jax.Array, batch: Trajectories) -> LossOutput:
  """Returns the cross-entropy of completion tokens, - sum_t log pi.

  Args:
    log_probs: f32[R, T].
    batch: rows whose completions are the targets.
  """
  mask = batch.completion_mask
  loss = Mean(
    -jnp.sum(jnp.where(mask, log_probs, 0.0)),
    jnp.sum(mask, dtype=jnp.float32),
  )
  return LossOutput(loss, {})


def supervised_trajectories(
  examples: Sequence[tuple[Sequence[int], Sequence[int]]],
  *,
  layout: packing.Layout,
  pad_token: int,
) -> Trajectories:
  """Returns rows of examples as numpy arrays, one example a row, or packed.

  Args:
    examples: (prompt tokens, completion tokens), neither empty.
    layout: prompts are not shared.
    pad_token: token id of padding.

  Raises:
    ValueError: if an example does not fit.
  """
  sizes = [len(prompt) + len(completion) for prompt, completion in examples]
  if layout.pack_tokens:
    length = layout.pack_tokens
    plan = packing.first_fit(sizes, length)
    rows_needed = packing.num_rows(len(plan), layout)
  else:
    length = -(-max(sizes) // layout.length_multiple) * layout.length_multiple
    plan = [[i] for i in range(len(examples))]
    rows_needed = len(plan)
  rows = batching.empty_rows(rows_needed, length, pad_token)
  for row, indices in enumerate(plan):
    start = 0
    for segment_id, i in enumerate(indices, 1):
      where = batching.place_sequence(
        rows, row, *examples[i], start=start, segment_id=segment_id
      )
      start = where.stop
  return rows


def make_supervised_step(
  config: config_lib.LlamaConfig,
  optimizer: optax.GradientTransformation,
  *,
  max_completion: int,
  **options: Any,
) -> step.TrainStepFn:
  """Returns a jitted step on `supervised_loss`; see `step.make_train_step`.

  Args:
    config: of the model.
    optimizer: see `optimizer.make_optimizer`.
    max_completion: completion tokens that a row may hold.
    **options: further arguments of `step.make_train_step`.
  """
  return step.make_train_step(
    config,
    supervised_loss,
    optimizer,
    temperature=1.0,
    max_completion=max_completion,
    **options,
  )
