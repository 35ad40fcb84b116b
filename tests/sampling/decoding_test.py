"""Decoding over slots against the full forward, and against itself."""

import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import segments
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules as rules_lib
from llamarl_jax.sharding import spec as spec_lib

_CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=32,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  mlp_width=48,
  rope_theta=1e4,
)
_MAX_PROMPT, _MAX_NEW = 4, 6
_STOP = (3, 7)


@functools.cache
def _params():
  """Drawn in numpy: no compilation; logits of about unit variance."""
  generator = np.random.default_rng(0)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      generator.normal('norm' in spec.logical_axes, 0.18, spec.shape),
      jnp.float32,
    ),
    llama.abstract_params(_CONFIG),
  )


def _request(index, max_new=_MAX_NEW, temperature=1.0):
  """Prompts of one to four tokens, in turn."""
  prompt = tuple(10 + (index + i) % 9 for i in range(1 + index % _MAX_PROMPT))
  problem = types.Problem(index=index, prompt='', answer='')
  return types.Request(
    index, types.Stream.TRAIN, problem, prompt, 2, temperature, max_new
  )


def _fill(state, assignments, params=None):
  filling = segments.pack(
    [segments.Assignment(*a) for a in assignments],
    num_slots=state.active.shape[0],
    max_prompt=_MAX_PROMPT,
    max_new=_MAX_NEW,
  )
  params = _params() if params is None else params
  return decoding.insert(_CONFIG, params, state, filling)


def _segment(state, num_steps=_MAX_NEW, version=0, params=None):
  return decoding.decode_segment(
    _CONFIG,
    _params() if params is None else params,
    state,
    jax.random.key(11),
    jnp.int32(version),
    num_steps=num_steps,
    stop_tokens=_STOP,
  )


def _init(num_slots):
  return decoding.init_state(_CONFIG, num_slots, _MAX_PROMPT, _MAX_NEW)


def _generate(wanted, num_slots, num_steps):
  """Returns (admission, sample) -> Finished, refilling slots as they free."""
  state = _init(num_slots)
  waiting, running, done = list(wanted), {}, {}
  while waiting or running:
    free = [slot for slot in range(num_slots) if slot not in running]
    new = [(*waiting.pop(0), slot) for slot in free[: len(waiting)]]
    if new:
      state = _fill(state, new)
      running.update({slot: True for *_, slot in new})
    state = _segment(state, num_steps)
    for finished in segments.harvest(state, list(running)):
      del running[finished.slot]
      done[finished.admission_index, finished.sample_index] = finished
  return done


@functools.cache
def _all_at_once():
  """32 completions of 16 prompts, decoded together in one segment."""
  wanted = [(_request(i // 2), i % 2) for i in range(32)]
  return _generate(wanted, num_slots=32, num_steps=_MAX_NEW)


def _full_log_probs(finished):
  """Returns the log-probs of completions by one forward of whole rows."""
  rows = np.zeros((len(finished), _MAX_PROMPT + _MAX_NEW), np.int32)
  marks = np.zeros_like(rows)
  starts = []
  for row, one in enumerate(finished):
    prompt = _request(one.admission_index).prompt_tokens
    sequence = [*prompt, *one.tokens]
    rows[row, : len(sequence)] = sequence
    marks[row, : len(sequence)] = 1
    starts.append(len(prompt))

  @jax.jit
  def score(params, tokens, segment_ids):
    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1])[None], tokens.shape
    )
    hidden = llama.hidden_states(
      _CONFIG, params, tokens, positions, segment_ids
    )
    scores = jax.nn.log_softmax(llama.logits(_CONFIG, params, hidden))
    return jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], 2)[..., 0]

  scores = np.asarray(score(_params(), rows, marks))
  return [
    scores[row, start - 1 : start - 1 + len(one.tokens)]
    for row, (start, one) in enumerate(zip(starts, finished, strict=True))
  ]


class DecodingTest(parameterized.TestCase):
  def _assert_same(self, one, other):
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)
    self.assertEqual(one.finish_reason, other.finish_reason)

  def test_log_probs_equal_the_full_forward(self):
    """32 slots, to 2e-5; both ways to finish occur, the stop token kept."""
    finished = list(_all_at_once().values())
    self.assertLen(finished, 32)
    for one, expected in zip(finished, _full_log_probs(finished), strict=True):
      np.testing.assert_allclose(one.log_probs, expected, atol=2e-5)
      stopped = one.finish_reason == types.FinishReason.STOP
      self.assertEqual(one.tokens[-1] in _STOP, stopped)
      self.assertFalse(set(one.tokens[:-1].tolist()) & set(_STOP))
      if not stopped:
        self.assertLen(one.tokens, _MAX_NEW)
    reasons = {one.finish_reason for one in finished}
    self.assertEqual(reasons, set(types.FinishReason))
    lengths = {len(one.tokens) for one in finished}
    self.assertGreater(len(lengths), 2)

  @parameterized.parameters((1, 1, 6), (3, 2, 16))
  def test_a_completion_depends_on_its_address_only(
    self, num_slots, num_steps, count
  ):
    """Not on slots, batch, order of admission, or length of segments."""
    wanted = [(_request(i // 2), i % 2) for i in reversed(range(count))]
    for address, one in _generate(wanted, num_slots, num_steps).items():
      self._assert_same(one, _all_at_once()[address])

  def test_samples_of_a_group_differ(self):
    done = _all_at_once()
    same = [
      done[i, 0].tokens.tolist() == done[i, 1].tokens.tolist()
      for i in range(16)
    ]
    self.assertLess(sum(same), 4)

  def test_limits_temperatures_and_stop_in_one_batch(self):
    state = _fill(
      _init(3),
      [
        (_request(0, max_new=1), 0, 0),
        (_request(1, temperature=0.0), 0, 1),
        (_request(1, temperature=0.0), 1, 2),
      ],
    )
    state = _segment(state)
    short, greedy, again = segments.harvest(state, range(3))
    self.assertLen(short.tokens, 1)
    self.assertEqual(short.finish_reason, types.FinishReason.LENGTH)
    # Greedy ignores its key; its log-probs are those of temperature 1.
    np.testing.assert_array_equal(greedy.tokens, again.tokens)
    np.testing.assert_allclose(
      greedy.log_probs, _full_log_probs([greedy])[0], atol=2e-5
    )

  def test_stop_at_the_first_token_and_done_slots_stay_as_they_are(self):
    admission, sample = next(
      address for address, one in _all_at_once().items() if len(one.tokens) == 1
    )
    state = _fill(_init(3), [(_request(admission), sample, 0)])
    state = _segment(state, num_steps=2)
    (stopped,) = segments.harvest(state, range(3))
    self.assertLen(stopped.tokens, 1)
    self.assertEqual(stopped.finish_reason, types.FinishReason.STOP)
    state = _fill(state, [(_request(2), 0, 2)])

    def rows(state):
      cache = state.cache.k[:, 0], state.cache.v[:, 0]
      return jax.tree.map(np.array, (state.replace(cache=None), *cache))

    before = rows(state)
    after = rows(_segment(state, num_steps=2, version=9))
    self.assertEqual(after[0].num_new.tolist(), [1, 0, 2])
    for was, now in zip(
      jax.tree.leaves(before[0]), jax.tree.leaves(after[0]), strict=True
    ):
      np.testing.assert_array_equal(was[:2], now[:2])
    np.testing.assert_array_equal(before[1], after[1])
    np.testing.assert_array_equal(before[2], after[2])

  def test_version_is_of_the_weights_that_sampled(self):
    """A completion goes on under new weights; its past is not rewritten."""
    state = _fill(_init(3), [(_request(4), 0, 1)])
    state = _segment(state, num_steps=2, version=5)
    before = jax.tree.map(np.array, (state.tokens, state.log_probs))
    changed = jax.tree.map(lambda x: -x, _params())
    state = _segment(state, num_steps=2, version=8, params=changed)
    state = _segment(state, num_steps=2, version=9)
    tokens, log_probs = np.asarray(state.tokens), np.asarray(state.log_probs)
    count = int(state.num_new[1])
    self.assertGreater(count, 2)
    np.testing.assert_array_equal(
      np.asarray(state.versions)[1, :count], [5, 5, 8, 8, 9, 9][:count]
    )
    np.testing.assert_array_equal(tokens[1, :2], before[0][1, :2])
    np.testing.assert_array_equal(log_probs[1, :2], before[1][1, :2])

  def test_two_devices_equal_one(self):
    mesh = mesh_lib.make_mesh({'tensor': 2}, jax.devices()[:2])
    rules = rules_lib.GENERATOR_RULES
    shardings, _ = rules_lib.shardings(
      llama.abstract_params(_CONFIG), mesh, rules
    )
    params = jax.device_put(_params(), shardings)
    whole = rules_lib.replicated(mesh)
    state = _init(3)
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
    state = _fill(state, [(_request(i), 0, i) for i in range(3)], params)
    state = _segment(state, params=params)
    self.assertFalse(state.cache.k.sharding.is_fully_replicated)
    for one in segments.harvest(state, range(3)):
      address = one.admission_index, one.sample_index
      self._assert_same(one, _all_at_once()[address])


if __name__ == '__main__':
  absltest.main()
