"""Continuous batching: completions depend on what is asked, not on how."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sampling import engine as engine_lib
from llamarl_jax.sampling import plan

_CONFIG = config_lib.LlamaConfig(
  vocab_size=24,
  width=16,
  num_layers=2,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=16,
  rope_theta=1e4,
)
_STOP = (3, 7)
_LONGEST, _NEW = 40, 10
_SETTINGS = plan.EngineSettings(
  num_slots=4,
  segment_length=3,
  max_prompt=_LONGEST,
  max_new=_NEW,
  prefill_tokens=32,
  least_width=16,
)
# The text of token i; 'ab' is token 20, 'bc' token 21.
_TEXTS = [chr(65 + i) for i in range(20)] + ['ab', 'bc', '', ' ']


@functools.cache
def _params(seed=0):
  """Drawn in numpy: no compilation; logits of about unit variance."""
  generator = np.random.default_rng(seed)
  return jax.tree.map(
    lambda spec: jnp.asarray(
      generator.normal('norm' in spec.logical_axes, 0.25, spec.shape),
      jnp.float32,
    ),
    llama.abstract_params(_CONFIG),
  )


def _decode(tokens):
  return ''.join(_TEXTS[token] for token in tokens)


def _request(index, length=None, max_new=_NEW, **changes):
  """Prompts of 1 to 40 tokens."""
  length = 1 + index * 13 % _LONGEST if length is None else length
  prompt = tuple(10 + (index + i * i) % 9 for i in range(length))
  fields = {'num_samples': 2, 'temperature': 1.0, 'max_new_tokens': max_new}
  problem = types.Problem(index=index, prompt='', answer='')
  return types.Request(
    index, types.Stream.TRAIN, problem, prompt, **(fields | changes)
  )


def _engine(config=_CONFIG, **changes):
  settings = plan.EngineSettings(**(vars(_SETTINGS) | changes))
  return engine_lib.Engine(
    config,
    settings,
    key=jax.random.key(11),
    stop_tokens=_STOP,
    decode_text=_decode,
  )


def _drain(engine, params=None, version=0, limit=400):
  """Returns (admission, sample) -> completion of all that is in the engine."""
  done = {}
  for _ in range(limit):
    result = engine.segment(_params() if params is None else params, version)
    for _, one in result.finished:
      done[one.admission_index, one.sample_index] = one
    if not engine.num_running + engine.num_waiting:
      return done
  raise AssertionError('the engine does not come to an end')


def _generate(requests, **changes):
  engine = _engine(**changes)
  engine.submit(requests)
  return _drain(engine)


@functools.cache
def _some():
  """24 completions of 12 requests, in four slots."""
  return _generate([_request(i) for i in range(12)])


@functools.cache
def _scorer():
  @jax.jit
  def score(params, tokens, segment_ids, penalty):
    positions = jnp.broadcast_to(
      jnp.arange(tokens.shape[1])[None], tokens.shape
    )
    hidden = llama.hidden_states(
      _CONFIG, params, tokens, positions, segment_ids
    )
    scores = llama.logits(_CONFIG, params, hidden)
    scores = jax.nn.log_softmax(scores + penalty[None, None, :])
    return jnp.take_along_axis(scores[:, :-1], tokens[:, 1:, None], 2)[..., 0]

  return score


def _full_log_probs(one, params=None, stops=True):
  """Returns log-probs of a completion by one forward of its whole sequence.

  Args:
    one: the completion.
    params: of the policy.
    stops: whether stop tokens could be sampled.
  """
  prompt = _request(one.admission_index).prompt_tokens
  sequence = [*prompt, *one.tokens]
  row = np.zeros((1, _LONGEST + _NEW), np.int32)
  row[0, : len(sequence)] = sequence
  mark = (np.arange(row.size)[None] < len(sequence)).astype(np.int32)
  params = _params() if params is None else params
  penalty = np.zeros(_CONFIG.vocab_size, np.float32)
  penalty[list(_STOP)] = 0 if stops else -np.inf
  scores = np.asarray(_scorer()(params, row, mark, penalty))
  return scores[0, len(prompt) - 1 : len(sequence) - 1]


def _completes(request, reference):
  return {
    address: one
    for address, one in reference.items()
    if address[0] == request.admission_index
  }


class EngineTest(parameterized.TestCase):
  def _assert_same(self, done, expected):
    self.assertEqual(done.keys(), expected.keys())
    for address, one in done.items():
      other = expected[address]
      np.testing.assert_array_equal(one.tokens, other.tokens)
      np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)
      self.assertEqual(one.finish_reason, other.finish_reason)
      self.assertEqual(one.text, other.text)

  def test_log_probs_equal_the_full_forward(self):
    """Prompts of 1 to 40 tokens, read in chunks of 16, in four slots."""
    self.assertLen(_some(), 24)
    for one in _some().values():
      np.testing.assert_allclose(one.log_probs, _full_log_probs(one), atol=2e-5)
      stopped = one.finish_reason == types.FinishReason.STOP
      self.assertEqual(one.tokens[-1] in _STOP, stopped)
      self.assertEqual(one.text, _decode(one.tokens))
    self.assertGreater(len({one.tokens.size for one in _some().values()}), 3)

  @parameterized.parameters(
    {'segment_length': 1},
    {'num_slots': 1},
    {'num_slots': 32, 'segment_length': _NEW, 'prefill_tokens': 64},
  )
  def test_same_completions_however_they_are_made(self, **changes):
    """For any slots, batch, order, chunks and length of segments."""
    requests = [_request(i) for i in reversed(range(12))]
    self._assert_same(_generate(requests, **changes), _some())

  def test_group_larger_than_the_slots_spans_refills(self):
    """Each sample starts as a slot falls free; the prompt is read once."""
    engine = _engine()
    engine.submit([_request(5, num_samples=11), _request(6)])
    read = 0
    begun = []
    while engine.num_running + engine.num_waiting:
      stats = engine.segment(_params(), 0).stats
      read += stats.prefill_tokens
      begun.append(stats.num_active)
    lengths = [len(_request(i).prompt_tokens) - 1 for i in (5, 6)]
    self.assertEqual(read, sum(lengths))
    self.assertEqual(max(begun), 4)
    whole = _generate([_request(5, num_samples=11)])
    self._assert_same(
      {k: v for k, v in whole.items() if k[1] < 2},
      _completes(_request(5), _some()),
    )

  def test_long_prompts_do_not_hold_up_decoding(self):
    """Bounded chunks go on beside it, and short prompts overtake long ones."""
    engine = _engine()
    first = _request(0, length=1, num_samples=4, min_new_tokens=_NEW)
    engine.submit([first])
    engine.segment(_params(), 0)
    self.assertEqual(engine.num_running, 4)
    engine.submit([_request(i, length=40) for i in range(1, 4)])
    engine.submit([_request(4, length=9, num_samples=1)])
    order = []
    while engine.num_running + engine.num_waiting:
      was_running = engine.num_running
      result = engine.segment(_params(), 0)
      order += [request.admission_index for request, _ in result.finished]
      if was_running > 2:  # Of four slots.
        self.assertLessEqual(result.stats.padded_tokens, 32)
        self.assertGreater(result.stats.num_active, 0)
    self.assertLess(order.index(4), len(order) - 1)

  def test_a_slot_that_falls_free_is_refilled_at_once(self):
    engine = _engine(segment_length=_NEW)
    engine.submit([_request(0, max_new=2, num_samples=4, min_new_tokens=2)])
    engine.submit([_request(1, max_new=1, num_samples=4)])
    # A segment ends once one of four slots is free while others wait.
    steps = [engine.segment(_params(), 0).stats.num_steps for _ in range(2)]
    self.assertEqual(steps, [2, 1])

  def test_limits_and_stops(self):
    one_token = _generate([_request(2, max_new=1)])
    self.assertEqual([c.tokens.size for c in one_token.values()], [1, 1])
    # The prompt at its limit, and the completion at its own.
    whole = _generate([_request(1, length=_LONGEST, min_new_tokens=_NEW)])
    for one in whole.values():
      self.assertEqual(one.tokens.size, _NEW)
      self.assertFalse({*one.tokens[:-1].tolist()} & {*_STOP})
    # A stop on the last token that is allowed is a stop.
    stopped = next(
      c
      for c in _some().values()
      if c.finish_reason == types.FinishReason.STOP and c.tokens.size > 1
    )
    index = stopped.admission_index
    again = _generate([_request(index, max_new=stopped.tokens.size)])
    one = again[index, stopped.sample_index]
    self.assertEqual(one.finish_reason, types.FinishReason.STOP)
    with self.assertRaisesRegex(ValueError, 'prompt of 41 tokens'):
      _engine().submit([_request(0), _request(1, length=41)])
    with self.assertRaisesRegex(ValueError, 'prompt of 0 tokens'):
      _engine().submit([_request(1, length=0)])

  @parameterized.parameters(1, 3, _NEW)
  def test_stop_string_across_tokens(self, segment_length):
    """At the first token that completes it, whatever the segments."""
    whole = next(c for c in _some().values() if c.tokens.size >= 6)
    text = _decode(whole.tokens)
    border = len(_decode(whole.tokens[:3]))
    stop = text[border - 1 : border + 1]  # Of the third and fourth token.
    self.assertEqual(text.index(stop), border - 1)
    request = _request(whole.admission_index, stop_strings=('?', stop))
    done = _generate([request], segment_length=segment_length)
    one = done[whole.admission_index, whole.sample_index]
    self.assertEqual(one.finish_reason, types.FinishReason.STOP)
    np.testing.assert_array_equal(one.tokens, whole.tokens[:4])
    np.testing.assert_allclose(one.log_probs, whole.log_probs[:4], atol=2e-5)
    self.assertEqual(one.text, text[: border - 1])


class WeightsTest(parameterized.TestCase):
  def _swap(self, **changes):
    """Returns an engine whose completions span a change of weights."""
    engine = _engine(**changes)
    requests = [
      _request(i, temperature=0.0, num_samples=1, min_new_tokens=_NEW)
      for i in (0, 1, 4, 7, 10, 13)  # Of one chunk each.
    ]
    engine.submit(requests)
    engine.segment(_params(), 4)
    self.assertEqual(engine.num_running, 4)
    return engine

  @parameterized.parameters('keep', 'prefill')
  def test_cache_under_new_weights(self, policy):
    """Read again it is that of a full forward; kept it is what was sampled."""
    engine = self._swap()
    if policy == 'prefill':
      engine.refresh()
    done = _drain(engine, _params(1), version=6)
    spanning = 0
    for one in done.values():
      new = one.versions == 6
      self.assertTrue(np.all(np.diff(one.versions) >= 0))
      spanning += 4 in one.versions
      full = _full_log_probs(one, _params(1), stops=False)
      gap = np.abs(one.log_probs - full)[new]
      if policy == 'prefill' or 4 not in one.versions:
        self.assertLess(gap.max(), 2e-5)
      else:
        self.assertGreater(gap.max(), 1e-3)
      old = _full_log_probs(one, stops=False)[~new]
      np.testing.assert_allclose(one.log_probs[~new], old, atol=2e-5)
    self.assertEqual(spanning, 4)

  @parameterized.parameters(1, 2)
  def test_budget_of_versions(self, limit):
    engine = self._swap(max_versions=limit, segment_length=2)
    done = []
    for version in (5, 6, 7, 8, 9):
      done += engine.segment(_params(), version).finished
    reasons = {one.finish_reason for _, one in done}
    self.assertIn(types.FinishReason.BUDGET, reasons)
    for _, one in done:
      self.assertLessEqual(len(set(one.versions)), limit)
      if one.finish_reason == types.FinishReason.BUDGET:
        self.assertEqual(one.tokens.size, 2 * limit)

  def test_suspended_and_resumed_elsewhere(self):
    """Greedily the same as without; before, the engine kept its own."""
    requests = [
      _request(i, temperature=0.0, min_new_tokens=_NEW) for i in range(5)
    ]
    whole = _generate(requests)
    first = _engine()
    first.submit(requests)
    done = {}
    for _ in range(2):
      for _, one in first.segment(_params(), 0).finished:
        done[one.admission_index, one.sample_index] = one
    suspended = first.suspend()
    counts = [len(one.tokens) for one in suspended]
    self.assertLen(suspended, 10 - len(done))
    self.assertGreater(max(counts), 0)
    self.assertEqual(min(counts), 0)
    second = _engine()
    second.resume(suspended)
    for engine in (first, second):
      rest = _drain(engine)
      both = done | rest
      self.assertEqual(both.keys(), whole.keys())
      for address, one in both.items():
        np.testing.assert_array_equal(one.tokens, whole[address].tokens)
        np.testing.assert_allclose(
          one.log_probs, whole[address].log_probs, atol=2e-5
        )


class SteadyStateTest(parameterized.TestCase):
  def test_nothing_is_compiled_after_warm_up(self):
    """1,000 requests, prompts of 1 to 500 tokens, mixed limits and swaps."""
    engine = _engine(
      dataclasses.replace(_CONFIG, num_layers=1),
      num_slots=8,
      segment_length=8,
      max_prompt=500,
      max_new=12,
      prefill_tokens=512,
      least_width=256,
      least_read=384,
    )
    layers = jax.tree.map(lambda x: x[:1], _params()['layers'])
    params = _params() | {'layers': layers}
    engine.warm_up(params)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
      lambda name, _, **__: (
        compiled.append(name)
        if name.endswith('backend_compile_duration')
        else None
      )
    )
    random = np.random.default_rng(1)
    requests = [
      _request(
        i,
        length=int(random.integers(1, 501)),
        max_new=int(random.integers(1, 13)),
        num_samples=int(random.integers(1, 3)),
        temperature=float(random.integers(0, 2)),
        stop_strings=('ab',) if i % 7 == 0 else (),
      )
      for i in range(1000)
    ]
    engine.submit(requests[:900])
    finished = 0
    step = 0
    while engine.num_running + engine.num_waiting:
      if step == 20:
        engine.submit(requests[900:])
      if step in (40, 41, 60):
        engine.refresh()
      finished += len(engine.segment(params, step // 10).finished)
      step += 1
    other = engine.suspend()
    self.assertEqual(other, [])
    self.assertEqual(finished, sum(r.num_samples for r in requests))
    self.assertEqual(compiled, [])
    # The listener hears of what is compiled.
    jax.jit(lambda x: x * 3 + finished)(jnp.arange(3))
    self.assertNotEmpty(compiled)


if __name__ == '__main__':
  absltest.main()
