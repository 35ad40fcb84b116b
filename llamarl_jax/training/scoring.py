"""What the policy says of a batch: log-probs and entropy at its completions."""

import dataclasses

import chex
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import projection
from llamarl_jax.types import Params
from llamarl_jax.types import Trajectories


@dataclasses.dataclass(frozen=True)
class Computation:
  """How the policy is computed: of influence on memory, speed and rounding.

  Attributes:
    dtype: of the factors of matrix products. Parameters, norms, softmax,
      log-probs and sums are in float32 in any case.
    remat: what the backward pass computes again, a key of `remat.POLICIES`.
    attention: a key of `attention.IMPLEMENTATIONS`.
    max_logits_bytes: see `projection.token_log_probs`.
  """

  dtype: jax.typing.DTypeLike = 'float32'
  remat: str = 'none'
  attention: str = 'auto'
  max_logits_bytes: int = projection.DEFAULT_MAX_BYTES


DEFAULT = Computation()


def policy_log_probs(
  config: config_lib.LlamaConfig,
  params: Params,
  batch: Trajectories,
  *,
  temperature: float,
  max_completion: int,
  computation: Computation = DEFAULT,
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
    computation: see Computation.
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
    compute_dtype=computation.dtype,
    remat=computation.remat,
    attention=computation.attention,
  )
  size = min(max_completion, mask.shape[1])
  # A stable sort of the inverted mask lists completion tokens first, in order.
  places = jnp.argsort(~mask, axis=1, stable=True)[:, :size]
  # Token t is predicted by what was read up to the token before it.
  if batch.predecessors is None:
    before = jnp.maximum(places - 1, 0)
  else:
    before = jnp.take_along_axis(batch.predecessors, places, axis=1)
  log_probs, entropy = projection.token_log_probs(
    config,
    params,
    jnp.take_along_axis(hidden, before[:, :, None], axis=1),
    jnp.take_along_axis(batch.tokens, places, axis=1),
    temperature=temperature,
    compute_dtype=computation.dtype,
    max_bytes=computation.max_logits_bytes,
  )
  rank = jnp.cumsum(mask, axis=1) - 1

  def spread(values: jax.Array) -> jax.Array:
    index = jnp.clip(rank, 0, size - 1)
    spread_out = jnp.take_along_axis(values, index, axis=1)
    inside = jnp.where(rank < size, spread_out, jnp.nan)
    return jnp.where(mask, inside, 0.0)

  return spread(log_probs), spread(entropy)
