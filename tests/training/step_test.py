"""The train step against one gradient of the whole mean loss."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamarl_jax import types
from llamarl_jax.training import optimizer as optimizers
from llamarl_jax.training import scoring
from llamarl_jax.training import state as states
from llamarl_jax.training import step as steps
from tests.oracles import plain_scoring

_CONFIG = plain_scoring.CONFIG
_TEMPERATURE = plain_scoring.TEMPERATURE
_params = plain_scoring.params
_batch = plain_scoring.batch
_FULL = scoring.Computation(remat='full')


def _loss(log_probs, batch):
  """A policy gradient that is not linear in the log-probs."""
  mask = batch.completion_mask
  ratio = jnp.exp(jnp.where(mask, log_probs - batch.behavior_log_probs, 0.0))
  terms = jnp.where(mask, -ratio * batch.advantages, 0.0)
  count = jnp.sum(mask, dtype=jnp.float32)
  metrics = {'ratio': types.Mean(jnp.sum(jnp.where(mask, ratio, 0.0)), count)}
  return types.LossOutput(types.Mean(jnp.sum(terms), count), metrics)


def _proximal_loss(log_probs, batch):
  """A clipped ratio to the proximal policy; its value tells them apart."""
  mask = batch.completion_mask
  ratio = jnp.exp(jnp.where(mask, log_probs - batch.proximal_log_probs, 0.0))
  surrogate = jnp.minimum(
    ratio * batch.advantages, jnp.clip(ratio, 0.8, 1.2) * batch.advantages
  )
  count = jnp.sum(mask, dtype=jnp.float32)
  loss = types.Mean(-jnp.sum(jnp.where(mask, surrogate, 0.0)), count)
  ratios = types.Mean(jnp.sum(jnp.where(mask, ratio, 0.0)), count)
  return types.LossOutput(loss, {'proximal_ratio': ratios})


@functools.cache
def _optimizer(learning_rate=0.05):
  # A large epsilon: Adam's first update of a gradient near 0 would otherwise
  # be its sign, which rounding decides.
  return optimizers.make_optimizer(
    learning_rate=learning_rate,
    epsilon=1e-2,
    weight_decay=0.1,
    clip_norm=1.0,
  )


@functools.cache
def _train_step(loss_fn=_loss, learning_rate=0.05, **options):
  return steps.make_train_step(
    _CONFIG,
    loss_fn,
    _optimizer(learning_rate),
    temperature=_TEMPERATURE,
    max_completion=5,
    **options,
  )


def _state(learning_rate=0.05):
  return states.init_train_state(_params(), _optimizer(learning_rate))


_jitted_full_log_probs = jax.jit(plain_scoring.log_probs_and_entropy)


@functools.partial(jax.jit, static_argnums=0)
def _direct_update(loss_fn, params, opt_state, batch):
  """The update by a gradient of the whole mean loss, without any split."""

  def mean_loss(params):
    total, count = loss_fn(
      plain_scoring.log_probs_and_entropy(params, batch)[0], batch
    ).loss
    return total / count

  loss, grads = jax.value_and_grad(mean_loss)(params)
  updates, opt_state = _optimizer().update(grads, opt_state, params)
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
  params = jax.tree.map(lambda p, u: p + u, params, updates)
  return params, opt_state, loss, norm


class TrainStepTest(parameterized.TestCase):
  @parameterized.parameters((1, 'none'), (4, 'full'))
  def test_equals_the_direct_gradient(self, num_micro_batches, remat):
    batch = _batch()
    start = _state()
    params, opt_state, loss, norm = _direct_update(
      _loss, start.params, start.opt_state, batch
    )

    step = _train_step(
      num_micro_batches=num_micro_batches,
      computation=scoring.Computation(remat=remat),
    )
    state, metrics = step(start, batch)

    # Float32 sums in another order.
    chex.assert_trees_all_close(state.params, params, atol=2e-6)
    chex.assert_trees_all_close(state.opt_state, opt_state, atol=2e-6)
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics['grad_norm'], norm, rtol=1e-5)
    self.assertEqual(int(state.batches_consumed), 1)
    self.assertEqual(int(state.skipped_steps), 0)
    self.assertEqual(float(metrics['completion_tokens']), 25)
    self.assertEqual(float(metrics['step_skipped']), 0)
    for value in metrics.values():
      self.assertEqual((value.shape, value.dtype), ((), jnp.float32))

  def test_a_batch_without_tokens_changes_nothing_but_the_version(self):
    batch = _batch()
    empty = batch.replace(completion_mask=np.zeros_like(batch.completion_mask))
    state, metrics = _train_step(num_micro_batches=4, computation=_FULL)(
      _state(), empty
    )
    chex.assert_trees_all_equal(state.params, _params())
    chex.assert_trees_all_equal(state.opt_state, _state().opt_state)
    self.assertEqual(int(state.batches_consumed), 1)
    self.assertEqual(int(state.skipped_steps), 0)
    for name, value in metrics.items():
      self.assertEqual(float(value), 0, name)

  @parameterized.parameters('advantages', 'behavior_log_probs')
  def test_a_step_that_is_not_finite_is_skipped_and_counted(self, field):
    step = _train_step(num_micro_batches=4, computation=_FULL)
    good = _batch()
    values = getattr(good, field).copy()
    values[3, 2] = np.nan
    state, _ = step(_state(), good)
    before = jax.tree.map(np.array, state)

    state, metrics = step(state, good.replace(**{field: values}))

    chex.assert_trees_all_equal(state.params, before.params)
    chex.assert_trees_all_equal(state.opt_state, before.opt_state)
    self.assertEqual(int(state.batches_consumed), 2)
    self.assertEqual(int(state.skipped_steps), 1)
    self.assertEqual(float(metrics['step_skipped']), 1)
    # And training goes on as if it had not been there.
    after, _ = step(state, good)
    twice, _ = step(jax.tree.map(jnp.asarray, before), good)
    chex.assert_trees_all_equal(after.params, twice.params)
    self.assertEqual(int(after.batches_consumed), 3)

  def test_zero_learning_rate_changes_no_bit(self):
    step = _train_step(learning_rate=0.0)
    state = _state(learning_rate=0.0)
    for _ in range(3):
      state, _ = step(state, _batch())
    chex.assert_trees_all_equal(state.params, _params())
    self.assertEqual(int(state.batches_consumed), 3)

  def test_one_update_a_batch_is_at_the_proximal_policy(self):
    """The ratio is 1 then, and its gradient that of the policy gradient."""
    step = _train_step(_proximal_loss, recompute_proximal=True)
    batch = _batch()
    state, metrics = step(_state(), batch)
    self.assertEqual(float(metrics['proximal_ratio']), 1.0)

    fixed = _jitted_full_log_probs(_params(), batch)[0]
    start = _state()
    params, *_ = _direct_update(
      _loss,
      start.params,
      start.opt_state,
      batch.replace(behavior_log_probs=fixed),
    )
    chex.assert_trees_all_close(state.params, params, atol=2e-6)

  def test_minibatches_are_updates_in_turn(self):
    """Against two direct updates on the even and on the odd rows."""
    batch = _batch()
    fixed = _jitted_full_log_probs(_params(), batch)[0]
    whole = batch.replace(proximal_log_probs=np.asarray(fixed))
    start = _state()
    params, opt_state = start.params, start.opt_state
    for part in (0, 1):
      rows = jax.tree.map(lambda x, p=part: x[p::2], whole)
      params, opt_state, _, _ = _direct_update(
        _proximal_loss, params, opt_state, rows
      )

    step = _train_step(_proximal_loss, num_minibatches=2, num_micro_batches=2)
    state, metrics = step(_state(), batch)

    chex.assert_trees_all_close(state.params, params, atol=5e-6)
    self.assertEqual(int(state.batches_consumed), 1)
    # The second update sees a policy that has moved.
    self.assertGreater(abs(float(metrics['proximal_ratio']) - 1), 1e-4)

  def test_bfloat16_moves_float32_weights(self):
    """The products are rounded to 8 bits; what is kept is not."""
    batch = _batch()
    # The update is then the gradient; Adam would blow up that of small ones.
    descent = optax.sgd(1.0)

    def update(computation):
      step = steps.make_train_step(
        _CONFIG,
        _loss,
        descent,
        temperature=_TEMPERATURE,
        max_completion=5,
        computation=computation,
      )
      return step(states.init_train_state(_params(), descent), batch)

    state, metrics = update(scoring.Computation(dtype='bfloat16', remat='dots'))
    expected, exact = update(scoring.DEFAULT)
    for leaf in jax.tree.leaves((state.params, metrics)):
      self.assertEqual(leaf.dtype, jnp.float32)
    for name in ('loss', 'entropy', 'grad_norm'):
      np.testing.assert_allclose(metrics[name], exact[name], rtol=0.03)
    error, size = (
      max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(tree))
      for tree in (
        jax.tree.map(jnp.subtract, state.params, expected.params),
        jax.tree.map(jnp.subtract, expected.params, _params()),
      )
    )
    # Each rounding is of 2 ** -9; some ten of them follow each other.
    self.assertLess(error, 0.03 * size)
    self.assertGreater(error, 0)

  def test_two_devices_equal_one(self):
    mesh = jax.sharding.Mesh(
      np.array(jax.devices()[:2]).reshape(1, 2), ('data', 'fsdp')
    )
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    by_axis = {'embedding': 1, 'scale': None}

    def sharding(path, leaf):
      # The largest dimension that two devices can share, but no norm's.
      name = path[-1].key
      axis = by_axis.get(name, leaf.ndim - 1)
      if axis is None:
        return whole
      spec = [None] * leaf.ndim
      spec[axis] = 'fsdp'
      return jax.sharding.NamedSharding(mesh, jax.P(*spec))

    params = _params()
    shardings = states.train_state_shardings(
      params,
      _optimizer(),
      jax.tree_util.tree_map_with_path(sharding, params),
      whole,
    )
    rows = jax.sharding.NamedSharding(mesh, jax.P(('data', 'fsdp')))
    step = steps.make_train_step(
      _CONFIG,
      _loss,
      _optimizer(),
      temperature=_TEMPERATURE,
      max_completion=5,
      num_micro_batches=4,
      computation=_FULL,
      state_shardings=shardings,
    )
    state = jax.device_put(_state(), shardings)
    batch = jax.device_put(_batch(), rows)
    one, one_step = (
      _state(),
      _train_step(num_micro_batches=4, computation=_FULL),
    )
    for _ in range(2):
      state, metrics = step(state, batch)
      one, expected = one_step(one, _batch())

    # Partial sums of two devices are added in another order.
    chex.assert_trees_all_close(
      jax.device_get(state), jax.device_get(one), atol=5e-6
    )
    chex.assert_trees_all_close(
      jax.device_get(metrics), jax.device_get(expected), rtol=1e-4, atol=1e-6
    )
    for leaf, wanted in zip(
      jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True
    ):
      self.assertTrue(leaf.sharding.is_equivalent_to(wanted, leaf.ndim))
    gate = state.params['layers']['mlp']['gate']
    self.assertEqual(gate.addressable_shards[0].data.shape, (2, 16, 12))

  def test_every_buffer_of_the_state_is_used_again(self):
    """All of parameters and optimizer state is written over its old place."""
    compiled = _train_step(num_micro_batches=1).lower(_state(), _batch())
    compiled = compiled.compile()
    self.assertIn('input_output_alias', compiled.as_text())
    self.assertEqual(
      compiled.memory_analysis().alias_size_in_bytes,
      sum(leaf.nbytes for leaf in jax.tree.leaves(_state())),
    )

  def test_the_state_is_donated_and_the_given_params_are_not(self):
    params = jax.device_put(_params())
    state = states.init_train_state(params, _optimizer())
    new, _ = _train_step(num_micro_batches=1)(state, _batch())
    self.assertTrue(state.params['embedding'].is_deleted())
    self.assertFalse(params['embedding'].is_deleted())
    self.assertFalse(new.params['embedding'].is_deleted())

  @parameterized.parameters(
    ({'temperature': 0.0}, 'temperature must be above 0 to train, got 0.0'),
    ({'num_micro_batches': 0}, 'num_micro_batches must be .* got 0'),
    ({'num_minibatches': -1}, 'num_minibatches must be'),
    ({'max_completion': 0}, 'max_completion must be'),
  )
  def test_bad_numbers_are_named(self, changes, message):
    options = {'temperature': 1.0, 'max_completion': 5} | changes
    with self.assertRaisesRegex(ValueError, message):
      steps.make_train_step(_CONFIG, _loss, _optimizer(), **options)

  def test_a_split_that_does_not_divide_is_named(self):
    step = _train_step(num_micro_batches=3)
    with self.assertRaisesRegex(ValueError, '8 rows .*num_micro_batches = 3'):
      step(_state(), _batch())


if __name__ == '__main__':
  absltest.main()
