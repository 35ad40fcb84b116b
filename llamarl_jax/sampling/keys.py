"""Random keys by address.

The key of a sampled token depends on what is sampled, never on where or when:
not on the slot, the replica, or what else is in the batch.
"""

import chex
import jax


def slot_keys(
  seed: chex.PRNGKey,
  stream: jax.Array,
  admission: jax.Array,
  sample: jax.Array,
) -> chex.PRNGKey:
  """Returns one key a slot, that of a whole completion.

  key = fold(fold(fold(seed, stream), admission), sample)

  Args:
    seed: the key of the run.
    stream: i32[S], `types.Stream` of the request.
    admission: i32[S], admission index of the request within its stream.
    sample: i32[S], index of the completion within its group.

  Returns:
    keys[S].
  """
  chex.assert_rank([stream, admission, sample], 1)
  chex.assert_equal_shape([stream, admission, sample])

  def fold(*address: jax.Array) -> chex.PRNGKey:
    key = seed
    for part in address:
      key = jax.random.fold_in(key, part)
    return key

  return jax.vmap(fold)(stream, admission, sample)


def at_position(keys: chex.PRNGKey, position: jax.Array) -> chex.PRNGKey:
  """Returns one key a slot, that of one token: fold(key, position).

  Args:
    keys: keys[S], of `slot_keys`.
    position: i32[S], index of the token within its completion.

  Returns:
    keys[S].
  """
  chex.assert_equal_shape([keys, position])
  return jax.vmap(jax.random.fold_in)(keys, position)


def token_keys(
  seed: chex.PRNGKey,
  stream: jax.Array,
  admission: jax.Array,
  sample: jax.Array,
  position: jax.Array,
) -> chex.PRNGKey:
  """Returns one key a slot, that of one token.

  key = at_position(slot_keys(seed, stream, admission, sample), position)

  Args:
    seed: the key of the run.
    stream: i32[S]; see `slot_keys`.
    admission: i32[S].
    sample: i32[S].
    position: i32[S]; see `at_position`.

  Returns:
    keys[S].
  """
  return at_position(slot_keys(seed, stream, admission, sample), position)
