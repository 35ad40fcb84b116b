"""The generator's commands: flip, refresh, suspend, and fetches that fail."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from llamarl_jax import types
from llamarl_jax.channels import weights
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import generator
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama

_TOKENIZER = tokenizers.CharacterTokenizer()
_SETTINGS = generator.GeneratorSettings(
  model=config_lib.LlamaConfig(
    vocab_size=_TOKENIZER.vocab_size,
    width=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    mlp_width=16,
    rope_theta=1e4,
  ),
  mesh={'tensor': 1},
  tokenizer=_TOKENIZER,
  seed=0,
  num_slots=4,
  segment_length=2,
  max_prompt_length=6,
  max_new_tokens=8,
)


@functools.cache
def _params(seed=0):
  draw = np.random.default_rng(seed)
  return jax.tree.map(
    lambda spec: draw.normal(
      'norm' in spec.logical_axes, 0.3, spec.shape
    ).astype(np.float32),
    llama.abstract_params(_SETTINGS.model),
  )


def _executor(**changes):
  return generator.GeneratorExecutor(
    devices=jax.devices()[:1],
    name='generator',
    settings=generator.GeneratorSettings(**(vars(_SETTINGS) | changes)),
  )


def _policy(executor, version, seed=0):
  params = jax.tree.map(jax.device_put, _params(seed), executor.param_shardings)
  return types.VersionedParams(types.Version(0, version), params)


def _requests(count, num_samples=3):
  return [
    types.Request(
      admission_index=i,
      stream=types.Stream.TRAIN,
      problem=types.Problem(i, '', ''),
      prompt_tokens=tuple(2 + (i + j) % 9 for j in range(1 + i % 6)),
      num_samples=num_samples,
      temperature=0.0,
      max_new_tokens=8,
      min_new_tokens=6,
    )
    for i in range(count)
  ]


def _drain(executor, inputs=()):
  """Returns groups by admission index, and the last report."""
  groups = {}
  for _ in range(100):
    report = executor.step(inputs, None)
    inputs = ()
    groups |= {g.request.admission_index: g for g in report.outputs}
    if report.unfinished == 0:
      return groups
  raise AssertionError('the generator does not come to an end')


class _Subscriber:
  """Fetches arrive when told to, or fail."""

  def __init__(self):
    self.report = None
    self.arrived = None

  def begin(self, manifest):
    self.arrived = None

  def ready(self):
    if isinstance(self.arrived, Exception):
      raise self.arrived
    return self.arrived is not None

  def take(self):
    return self.arrived

  def close(self):
    pass


class GeneratorTest(parameterized.TestCase):
  def test_groups_come_whole_and_in_sample_order(self):
    """Five groups of three in four slots, whose groups span refills."""
    executor = _executor()
    executor.adopt(_policy(executor, 0))
    groups = _drain(executor, _requests(5))
    self.assertEqual(sorted(groups), list(range(5)))
    for group in groups.values():
      self.assertEqual([c.sample_index for c in group.completions], [0, 1, 2])
    self.assertEqual(executor.step([], None).status, types.Status.STARVED)

  def test_one_replica_or_three_make_the_same(self):
    """Sampled at temperature 1, in other batches and slots."""
    requests = [
      dataclasses.replace(request, temperature=1.0) for request in _requests(6)
    ]
    groups = []
    for shares in ([requests], [requests[4:], requests[:1], requests[1:4]]):
      made = {}
      for share in shares:
        executor = _executor()
        executor.adopt(_policy(executor, 0))
        made |= _drain(executor, share)
      groups.append(made)
    self.assertEqual(groups[0].keys(), groups[1].keys())
    for index, group in groups[0].items():
      for one, other in zip(
        group.completions, groups[1][index].completions, strict=True
      ):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)

  def test_restored_elsewhere_it_goes_on(self):
    executor = _executor()
    executor.adopt(_policy(executor, 0))
    whole = _drain(executor, _requests(5))
    first = _executor()
    first.adopt(_policy(first, 0))
    early = {}
    inputs = _requests(5)
    # Until a group is done, one in part, one in slots and one not begun.
    while True:
      outputs = first.step(inputs, None).outputs
      early |= {g.request.admission_index: g for g in outputs}
      inputs = ()
      state = first.state()
      partial = [done for _, done in state['groups'] if done]
      counts = [one.tokens.size for one in state['unfinished']]
      if early and partial and max(counts) > 0:
        break
    self.assertEqual(min(counts), 0)
    first.close()
    second = _executor()
    second.restore(state)
    second.adopt(_policy(second, 0))
    groups = early | _drain(second)
    self.assertEqual(groups.keys(), whole.keys())
    for index, group in groups.items():
      pairs = zip(group.completions, whole[index].completions, strict=True)
      for one, other in pairs:
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=2e-5)

  @parameterized.parameters('keep', 'prefill')
  def test_flips_between_segments_without_draining(self, refresh_cache):
    executor = _executor(refresh_cache=refresh_cache)
    subscriber = executor._subscriber = _Subscriber()
    executor.adopt(_policy(executor, 3))
    self.assertIsNone(executor.step(_requests(1), None).fetched)
    executor.begin_fetch(None)
    # Decoding goes on while nothing has arrived.
    self.assertIsNone(executor.step([], None).fetched)
    new = _policy(executor, 4, seed=1)
    subscriber.arrived = new
    self.assertEqual(executor.step([], None).fetched, new.version)
    groups = []
    report = executor.step([], new.version)
    while not groups:
      groups += report.outputs
      report = executor.step([], None)
    for one in groups[0].completions:
      self.assertEqual(one.versions.tolist()[:6], [3] * 6)
      self.assertEqual(set(one.versions[6:].tolist()), {4})
    with self.assertRaisesRegex(ValueError, 'told to commit'):
      executor.step([], new.version)

  def test_a_failed_fetch_is_reported_and_the_old_version_serves_on(self):
    executor = _executor()
    subscriber = executor._subscriber = _Subscriber()
    executor.adopt(_policy(executor, 0))
    for _ in range(3):
      executor.begin_fetch(None)
      subscriber.arrived = weights.WeightTransferError('gone')
      report = executor.step(_requests(1), None)
      self.assertTrue(report.fetch_failed)
      self.assertEqual(report.status, types.Status.PROGRESSED)
      self.assertFalse(executor.step([], None).fetch_failed)
      _drain(executor)
    executor.begin_fetch(None)
    subscriber.arrived = weights.WeightTransferError('gone')
    with pytest.raises(weights.WeightTransferError, match='gone'):
      executor.step([], None)

  def test_needs_parameters_first(self):
    with self.assertRaisesRegex(ValueError, 'no parameters yet'):
      _executor().step(_requests(1), None)
