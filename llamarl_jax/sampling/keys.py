"""Random keys by address.

The key of a sampled token depends on what is sampled, never on where or when:
not on the slot, the replica, or what else is in the batch.
"""

import chex
import jax


def token_keys(
  seed: chex.PRNGKey,
  stream: jax.Array,
  admission: jax.Array,
  sample: jax.Array,
  position: jax.Array,
) -> chex.PRNGKey:
  """Returns one key a slot.

  key = fold(fold(fold(fold(seed, stream), admission), sample), position)

  Args:
    seed: the key of the run.
    stream: i32[S], `types.Stream` of the request.
    admission: i32[S], admission index of the request within its stream.
    sample: i32[S], index of the completion within its group.
    position: i32[S], index of the token within its completion.

  Returns:
    keys[S].
  """
  chex.assert_rank([stream, admission, sample, position], 1)
  chex.assert_equal_shape([stream, admission, sample, position])

  def fold(*address: jax.Array) -> chex.PRNGKey:
    key = seed
    for part in address:
      key = jax.random.fold_in(key, part)
    return key

  return jax.vmap(fold)(stream, admission, sample, position)
