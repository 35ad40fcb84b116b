"""Decoding over slots against the full forward, and against itself."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import slots as slots_lib
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules as rules_lib
from llamarl_jax.sharding import spec as spec_lib
from tests.oracles import tiny_slots


@functools.cache
def _all_at_once():
  """32 completions of 16 prompts, decoded together in one segment."""
  wanted = [(i // 2, i % 2) for i in range(32)]
  return tiny_slots.generate(wanted, num_slots=32, num_steps=tiny_slots.MAX_NEW)


def _full_log_probs(finished, whole=False):
  """Returns the log-probs of completions by one forward of whole rows.

  Of their tokens, or of the `whole` vocabulary.
  """
  rows = np.zeros(
    (len(finished), tiny_slots.MAX_PROMPT + tiny_slots.MAX_NEW), np.int32
  )
  starts = []
  for row, one in enumerate(finished):
    sequence = [*tiny_slots.prompt(one.admission), *one.tokens]
    rows[row, : len(sequence)] = sequence
    starts.append(len(sequence) - len(one.tokens))

  @jax.jit
  def score(params, tokens):
    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1])[None], tokens.shape
    )
    hidden = llama.hidden_states(
      tiny_slots.CONFIG, params, tokens, positions, jnp.ones_like(tokens)
    )
    return jax.nn.log_softmax(llama.logits(tiny_slots.CONFIG, params, hidden))

  scores = np.asarray(score(tiny_slots.params(), rows))[:, :-1]
  if not whole:
    scores = np.take_along_axis(scores, rows[:, 1:, None], 2)[..., 0]
  return [
    scores[row, start - 1 : start - 1 + len(one.tokens)]
    for row, (start, one) in enumerate(zip(starts, finished, strict=True))
  ]


class DecodingTest(parameterized.TestCase):
  def _assert_same(self, one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)
    self.assertEqual(one.finish, other.finish)

  def test_log_probs_equal_the_full_forward(self):
    """32 slots, to 2e-5; both ways to finish occur, the stop token kept."""
    finished = list(_all_at_once().values())
    self.assertLen(finished, 32)
    for one, expected in zip(finished, _full_log_probs(finished), strict=True):
      np.testing.assert_allclose(one.log_probs, expected, atol=2e-5)
      stopped = one.finish == slots_lib.STOPPED
      self.assertEqual(one.tokens[-1] in tiny_slots.STOP, stopped)
      self.assertFalse(set(one.tokens[:-1].tolist()) & set(tiny_slots.STOP))
      if not stopped:
        self.assertLen(one.tokens, tiny_slots.MAX_NEW)
    ways = {one.finish for one in finished}
    self.assertEqual(ways, {slots_lib.STOPPED, slots_lib.FULL})
    lengths = {len(one.tokens) for one in finished}
    self.assertGreater(len(lengths), 2)

  @parameterized.parameters(
    (1, 1, 6, False), (3, 2, 16, False), (3, 2, 16, True)
  )
  def test_a_completion_depends_on_its_address_only(
    self, num_slots, num_steps, count, stacked
  ):
    """Not on slots, batch, order of admission, or length of segments.

    Nor on whether the layers are taken apart.
    """
    settings = {'weights': tiny_slots.params()} if stacked else {'max_steps': 2}
    wanted = [(i // 2, i % 2) for i in reversed(range(count))]
    for address, one in tiny_slots.generate(
      wanted, num_slots, num_steps, **settings
    ).items():
      self._assert_same(one, _all_at_once()[address])

  def test_samples_of_a_group_differ(self):
    done = _all_at_once()
    same = [
      done[i, 0].tokens.tolist() == done[i, 1].tokens.tolist()
      for i in range(16)
    ]
    self.assertLess(sum(same), 4)

  def test_limits_temperatures_and_stop_in_one_batch(self):
    state = tiny_slots.fill(tiny_slots.empty(3), [(0, 0, 0)], max_new=1)
    state = tiny_slots.fill(state, [(1, 0, 1), (1, 1, 2)], temperature=0.0)
    state = tiny_slots.segment(state)
    short, greedy, again = tiny_slots.harvest(state, range(3)).values()
    self.assertLen(short.tokens, 1)
    self.assertEqual(short.finish, slots_lib.FULL)
    # Greedy ignores its key; its log-probs are those of temperature 1.
    np.testing.assert_array_equal(greedy.tokens, again.tokens)
    np.testing.assert_allclose(
      greedy.log_probs, _full_log_probs([greedy])[0], atol=2e-5
    )

  def test_stop_at_the_first_token_and_done_slots_stay_as_they_are(self):
    admission, sample = next(
      address for address, one in _all_at_once().items() if len(one.tokens) == 1
    )
    state = tiny_slots.fill(tiny_slots.empty(3), [(admission, sample, 0)])
    state = tiny_slots.segment(state, num_steps=2)
    (stopped,) = tiny_slots.harvest(state, range(3)).values()
    self.assertLen(stopped.tokens, 1)
    self.assertEqual(stopped.finish, slots_lib.STOPPED)
    state = tiny_slots.fill(state, [(2, 0, 2)])

    def rows(state):
      cache = state.cache.k[:, 0], state.cache.v[:, 0]
      return jax.tree.map(np.array, (state.replace(cache=None), *cache))

    before = rows(state)
    after = rows(tiny_slots.segment(state, num_steps=2, version=9))
    self.assertEqual(after[0].num_new.tolist(), [1, 0, 2])
    for was, now in zip(
      jax.tree.leaves(before[0]), jax.tree.leaves(after[0]), strict=True
    ):
      np.testing.assert_array_equal(was[:2], now[:2])
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(before[2], after[2])

  def test_version_is_of_the_weights_that_sampled(self):
    """A completion goes on under new weights; its past is not rewritten."""
    state = tiny_slots.fill(tiny_slots.empty(3), [(4, 0, 1)])
    state = tiny_slots.segment(state, num_steps=2, version=5)
    before = jax.tree.map(np.array, (state.tokens, state.log_probs))
    changed = jax.tree.map(lambda x: -x, tiny_slots.params())
    state = tiny_slots.segment(state, num_steps=2, version=8, weights=changed)
    state = tiny_slots.segment(state, num_steps=2, version=9)
    tokens, log_probs = np.asarray(state.tokens), np.asarray(state.log_probs)
    count = int(state.num_new[1])
    self.assertGreater(count, 2)
    np.testing.assert_array_equal(
      np.asarray(state.versions)[1, :count], [5, 5, 8, 8, 9, 9][:count]
    )
    np.testing.assert_array_equal(tokens[1, :2], before[0][1, :2])
    np.testing.assert_array_equal(log_probs[1, :2], before[1][1, :2])

  def test_no_stop_token_before_it_is_allowed(self):
    """Those asked for early stop otherwise; the log-probs are of what is left.

    Of softmax over all but the stop tokens: log p - log(1 - p(stop tokens)).
    """
    early = [
      address for address, one in _all_at_once().items() if len(one.tokens) < 3
    ]
    self.assertGreater(len(early), 2)
    state = tiny_slots.fill(
      tiny_slots.empty(32), [(*a, i) for i, a in enumerate(early)], min_new=3
    )
    done = tiny_slots.harvest(tiny_slots.segment(state), range(len(early)))
    scores = _full_log_probs(list(done.values()), whole=True)
    for one, expected in zip(done.values(), scores, strict=True):
      self.assertGreaterEqual(len(one.tokens), 3)
      self.assertFalse(set(one.tokens[:2].tolist()) & set(tiny_slots.STOP))
      stops = np.exp(expected[:2, tiny_slots.STOP]).sum(axis=-1)
      chosen = expected[np.arange(2), one.tokens[:2]]
      np.testing.assert_allclose(
        one.log_probs[:2], chosen - np.log1p(-stops), atol=2e-5
      )

  def test_ends_early_and_reads_no_more_than_it_must(self):
    """With 2 of 3 slots active where 3 are wanted, after the first token."""
    state = tiny_slots.fill(tiny_slots.empty(3), [(0, 0, 0)], max_new=1)
    state = tiny_slots.fill(
      state, [(5, 0, 1), (5, 1, 2)], temperature=0.0, min_new=3
    )
    state = tiny_slots.segment(state, min_active=3, read_length=5)
    self.assertEqual(state.num_new.tolist(), [1, 1, 1])
    # The prompt of admission 5 has two tokens: one more is read by now.
    cache = np.asarray(state.cache.k)
    self.assertTrue(np.any(cache[:, 1, :, 1]))
    self.assertFalse(np.any(cache[:, 1, :, 2:]))
    state = tiny_slots.segment(state, num_steps=2, read_length=5)
    self.assertEqual(state.num_new.tolist(), [1, 3, 3])
    state = tiny_slots.segment(state)
    short, one, again = tiny_slots.harvest(state, range(3)).values()
    np.testing.assert_array_equal(one.tokens, again.tokens)
    whole = tiny_slots.fill(
      tiny_slots.empty(3), [(5, 0, 1)], temperature=0.0, min_new=3
    )
    (at_once,) = tiny_slots.harvest(tiny_slots.segment(whole), [1]).values()
    self._assert_same(one, at_once)
    self.assertLen(short.tokens, 1)

  @parameterized.parameters(False, True)
  def test_two_devices_equal_one(self, stacked):
    mesh = mesh_lib.make_mesh({'tensor': 2}, jax.devices()[:2])
    rules = rules_lib.GENERATOR_RULES
    shardings, _ = rules_lib.shardings(
      llama.abstract_params(tiny_slots.CONFIG), mesh, rules
    )
    params = jax.device_put(tiny_slots.params(), shardings)
    whole = rules_lib.replicated(mesh)
    state = tiny_slots.empty(3)
    axes = kv_cache.LOGICAL_AXES
    heads = NamedSharding(
      mesh,
      rules_lib.partition_spec(
        spec_lib.ParamSpec(state.cache.k.shape, jnp.float32, axes), rules, mesh
      ),
    )
    layout = jax.tree.map(lambda _: whole, state)
    layout = layout.replace(cache=kv_cache.KVCache(heads, heads))
    state = jax.device_put(state, layout)
    state = tiny_slots.fill(state, [(i, 0, i) for i in range(3)], params)
    if not stacked:
      params = decoding.prepare(tiny_slots.CONFIG, params)
      self.assertFalse(params['head'].sharding.is_fully_replicated)
    state = tiny_slots.segment(state, weights=params)
    self.assertFalse(state.cache.k.sharding.is_fully_replicated)
    for one in tiny_slots.harvest(state, range(3)).values():
      self._assert_same(one, _all_at_once()[one.admission, one.sample])


if __name__ == '__main__':
  absltest.main()
