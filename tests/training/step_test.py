import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.training import batching
from llamarl_jax.training import optimizer as optimizers
from llamarl_jax.training import scoring
from llamarl_jax.training import state as states
from llamarl_jax.training import step as steps

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
_ROWS = 8
_TEMPERATURE = 0.7
_FULL = scoring.Computation(remat='full')
# Unequal on purpose: micro-batches of 2 hold from 4 to 9 tokens.
_PROMPT_LENGTHS = (1, 2, 3, 2, 4, 1, 2, 3)
_COMPLETION_LENGTHS = (5, 1, 2, 4, 3, 5, 1, 4)


def setUpModule():
  # Compiling is most of the time here, and speed does not matter.
  jax.config.update('jax_disable_most_optimizations', True)


def tearDownModule():
  jax.config.update('jax_disable_most_optimizations', False)


@functools.cache
def _params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: np.float32(rng.normal(size=spec.shape) / 3),
    llama.abstract_params(_CONFIG),
  )


@functools.cache
def _jitted_log_probs(max_completion, temperature=_TEMPERATURE):
  return jax.jit(
    functools.partial(
      scoring.policy_log_probs,
      _CONFIG,
      temperature=temperature,
      max_completion=max_completion,
    )
  )


def _batch():
  rng = np.random.default_rng(1)
  rows = batching.empty_rows(_ROWS, 8, pad_token=0)
  lengths = zip(_PROMPT_LENGTHS, _COMPLETION_LENGTHS, strict=True)
  for row, (prompt, completion) in enumerate(lengths):
    where = batching.place_sequence(
      rows,
      row,
      rng.integers(11, size=prompt),
      rng.integers(11, size=completion),
    )
    rows.advantages[row, where] = rng.normal()
    rows.behavior_log_probs[row, where] = rng.uniform(-3, -1, completion)
  return rows


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


def _full_log_probs(params, batch):
  """The plain way: logits everywhere, shifted by one."""
  hidden = llama.hidden_states(
    _CONFIG, params, batch.tokens, batch.positions, batch.segment_ids
  )
  logits = llama.logits(_CONFIG, params, hidden) / _TEMPERATURE
  table = jax.nn.log_softmax(logits, axis=-1)
  scored = jnp.take_along_axis(table[:, :-1], batch.tokens[:, 1:, None], -1)
  entropy = -jnp.sum(jnp.exp(table) * table, axis=-1)[:, :-1]

  def shift(values):
    values = jnp.pad(values, ((0, 0), (1, 0)))
    return jnp.where(batch.completion_mask, values, 0.0)

  return shift(scored[..., 0]), shift(entropy)


_jitted_full_log_probs = jax.jit(_full_log_probs)


@functools.partial(jax.jit, static_argnums=0)
def _direct_update(loss_fn, params, opt_state, batch):
  """The update by a gradient of the whole mean loss, without any split."""

  def mean_loss(params):
    total, count = loss_fn(_full_log_probs(params, batch)[0], batch).loss
    return total / count

  loss, grads = jax.value_and_grad(mean_loss)(params)
  updates, opt_state = _optimizer().update(grads, opt_state, params)
  norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
  params = jax.tree.map(lambda p, u: p + u, params, updates)
  return params, opt_state, loss, norm


class PolicyLogProbsTest(parameterized.TestCase):
  @parameterized.parameters(5, 100)
  def test_equals_full_logits(self, max_completion):
    batch = _batch()
    log_probs, entropy = _jitted_log_probs(max_completion)(_params(), batch)
    expected = _jitted_full_log_probs(_params(), batch)
    # Sums of 16 products in another order: a few float32 roundings.
    chex.assert_trees_all_close((log_probs, entropy), expected, atol=1e-5)
    self.assertTrue(np.all(np.asarray(log_probs)[~batch.completion_mask] == 0))
    self.assertTrue(np.all(np.asarray(log_probs)[batch.completion_mask] < 0))

  def test_packed_rows_score_as_single_ones(self):
    """Two sequences in one row, each with its own segment and positions."""
    single = _batch()
    lengths = [
      p + c for p, c in zip(_PROMPT_LENGTHS, _COMPLETION_LENGTHS, strict=True)
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
    apart = np.asarray(_jitted_log_probs(5)(_params(), single)[0])
    together = np.asarray(_jitted_log_probs(10)(_params(), packed)[0])
    for row in range(4):
      expected = np.concatenate(
        [apart[s, : lengths[s]] for s in (row, row + 4)]
      )
      np.testing.assert_allclose(
        together[row, : expected.size], expected, atol=1e-5
      )

  def test_completions_beyond_the_limit_do_not_pass_silently(self):
    log_probs, _ = _jitted_log_probs(4)(_params(), _batch())
    lost = np.isnan(log_probs)
    # Two rows have five completion tokens: the fifth of each has no place.
    np.testing.assert_array_equal(np.argwhere(lost), [[0, 5], [5, 5]])


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
