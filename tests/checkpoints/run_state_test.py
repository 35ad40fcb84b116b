import contextlib
import io
import logging
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import numpy as np

from llamarl_jax.checkpoints import run_state
from llamarl_jax.training import optimizer as optimizers
from llamarl_jax.training import state as states


def _state(width=4, seed=0):
  rng = np.random.default_rng(seed)
  params = {
    'layers': {
      'kernel': rng.normal(size=(2, width, 6)).astype(np.float32),
      'norm': np.ones((2, width), np.float32),
    },
    'embed': rng.normal(size=(8, width)).astype(np.float32),
  }
  params = jax.device_put(params)
  optimizer = optimizers.make_optimizer(learning_rate=0.1, weight_decay=0.1)
  state = states.init_train_state(params, optimizer)
  return jax.device_put(
    state.replace(
      opt_state=jax.tree.map(
        lambda x: rng.integers(9, size=x.shape).astype(x.dtype),
        state.opt_state,
      ),
      batches_consumed=np.int32(7),
      skipped_steps=np.int32(2),
    )
  )


class RunStateTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    temporary = tempfile.TemporaryDirectory()
    self.addCleanup(temporary.cleanup)
    self.folder = pathlib.Path(temporary.name) / 'checkpoints'

  def _open(self, **kwargs):
    checkpointer = run_state.RunStateCheckpointer(self.folder, **kwargs)
    self.addCleanup(checkpointer.close)
    return checkpointer

  def test_round_trip_is_bit_exact_in_another_process_or_tree(self):
    state = _state()
    metadata = {'incarnation': 3, 'batches_consumed': 7, 'fingerprint': 'ab'}
    self._open().save(7, state, metadata)

    # A new object, as a restarted run has, with other values in its state.
    restored, facts = self._open().restore(_state(seed=5))

    self.assertEqual(facts, metadata)
    chex.assert_trees_all_equal(restored, state)
    chex.assert_trees_all_equal_dtypes(restored, state)
    chex.assert_trees_all_equal_structs(restored, state)

  def test_restores_onto_another_sharding(self):
    state = _state()
    self._open().save(1, state, {})
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('fsdp',))
    sharded = jax.sharding.NamedSharding(mesh, jax.P(None, 'fsdp'))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharded if x.ndim > 1 else whole
      ),
      state,
    )

    restored, _ = self._open().restore(abstract)

    chex.assert_trees_all_equal(restored, state)
    kernel = restored.params['layers']['kernel']
    self.assertEqual(kernel.sharding, sharded)
    self.assertEqual(kernel.addressable_shards[0].data.shape, (2, 2, 6))

  def test_keeps_the_newest(self):
    checkpointer = self._open(keep=2)
    self.assertIsNone(checkpointer.latest_step())
    for step in (2, 4, 6):
      state = _state().replace(batches_consumed=jax.device_put(np.int32(step)))
      checkpointer.save(step, state, {'step': step})

    self.assertEqual(checkpointer.latest_step(), 6)
    steps = sorted(int(p.name) for p in self.folder.iterdir())
    self.assertEqual(steps, [4, 6])
    restored, facts = checkpointer.restore(_state(), step=4)
    self.assertEqual(facts, {'step': 4})
    self.assertEqual(int(restored.batches_consumed), 4)
    with self.assertRaisesRegex(FileNotFoundError, r'step 2.*\[4, 6\]'):
      checkpointer.restore(_state(), step=2)
    with self.assertRaisesRegex(ValueError, 'step 6'):
      checkpointer.save(6, _state(), {})

  def test_an_unfinished_checkpoint_is_not_seen(self):
    checkpointer = self._open()
    checkpointer.save(1, _state(), {})
    # What a process killed while saving leaves: a folder not yet renamed.
    (self.folder / '2.orbax-checkpoint-tmp' / 'params').mkdir(parents=True)
    self.assertEqual(self._open().latest_step(), 1)

  def test_params_only(self):
    state = _state()
    checkpointer = self._open()
    checkpointer.save(1, state, {'incarnation': 0})
    # Closed twice, here and at clean-up: allowed.
    checkpointer.close()

    abstract = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params
    )
    params = run_state.load_params(self.folder, abstract)

    chex.assert_trees_all_equal(params, state.params)
    self.assertEqual(self._open().metadata(), {'incarnation': 0})

  def test_missing_folder_and_empty_folder(self):
    with self.assertRaisesRegex(FileNotFoundError, 'no folder .*checkpoints'):
      run_state.load_params(self.folder, {})
    self.assertFalse(self.folder.exists())
    self.folder.mkdir()
    with self.assertRaisesRegex(FileNotFoundError, 'no checkpoint in'):
      run_state.load_params(self.folder, {})
    with self.assertRaisesRegex(ValueError, 'keep must be'):
      run_state.RunStateCheckpointer(self.folder, keep=0)

  def test_mismatch_names_every_leaf(self):
    self._open().save(1, _state(), {})
    wanted = dict(_state(width=8).params)
    wanted['head'] = wanted.pop('embed')
    with self.assertRaises(ValueError) as caught:
      run_state.load_params(self.folder, wanted)
    message = str(caught.exception)
    self.assertNotIn('\n', message)
    for part in (
      'head is not in it',
      'embed is not wanted',
      'layers.kernel has shape (2, 4, 6), wanted (2, 8, 6)',
      'layers.norm has shape (2, 4), wanted (2, 8)',
    ):
      self.assertIn(part, message)

  def test_prints_and_logs_nothing(self):
    logger = logging.getLogger('absl')
    before = logger.level
    self.addCleanup(logger.setLevel, before)
    logger.setLevel(logging.INFO)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      handler = logging.StreamHandler(err)
      logger.addHandler(handler)
      self.addCleanup(logger.removeHandler, handler)
      checkpointer = self._open()
      checkpointer.save(1, _state(), {})
      checkpointer.restore(_state())
    self.assertEqual(out.getvalue(), '')
    self.assertEqual(err.getvalue(), '')


if __name__ == '__main__':
  absltest.main()
