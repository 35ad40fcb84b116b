"""Packed rows: what fits together, and that training does not notice."""

import functools

from absl.testing import parameterized
import chex
import jax
import numpy as np
import optax

from llamarl_jax import types
from llamarl_jax.algorithms import registry
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.training import batching
from llamarl_jax.training import packing
from llamarl_jax.training import state as states
from llamarl_jax.training import step as steps
from llamarl_jax.training import supervised
from tests.oracles import groups as groups_lib

_CONFIG = config_lib.LlamaConfig(
  vocab_size=7,
  width=8,
  num_layers=1,
  num_heads=1,
  num_kv_heads=1,
  head_dim=8,
  mlp_width=8,
  rope_theta=1e4,
)
_PROMPT = 20


def _skewed_groups(num_groups, size, median=68.0, longest=1024 - _PROMPT):
  """Completions of log-normal length, of mean 100 in the limit."""
  rng = np.random.default_rng(0)
  sigma = np.sqrt(2 * np.log(100 / median))
  groups = []
  for n in range(num_groups):
    lengths = rng.lognormal(np.log(median), sigma, size).astype(int)
    completions = [
      types.Completion(
        admission_index=n,
        sample_index=g,
        tokens=rng.integers(7, size=length).astype(np.int32),
        log_probs=rng.uniform(-3, -1, length).astype(np.float32),
        versions=np.zeros(length, np.int32),
        finish_reason=types.FinishReason.STOP,
        text='',
      )
      for g, length in enumerate(np.clip(lengths, 1, longest))
    ]
    request = types.Request(
      admission_index=n,
      stream=types.Stream.TRAIN,
      problem=types.Problem(n, '', ''),
      prompt_tokens=tuple(rng.integers(7, size=_PROMPT).tolist()),
      num_samples=size,
      temperature=1.0,
      max_new_tokens=longest,
    )
    groups.append(types.Group(request, tuple(completions)))
  return groups


def _rows(groups, layout):
  rng = np.random.default_rng(1)
  size = groups[0].request.num_samples
  plan, length = batching.plan_rows(groups, layout)
  return batching.build_trajectories(
    groups,
    rng.normal(size=(len(groups), size)).astype(np.float32),
    row_length=length,
    pad_token=0,
    share_prompts=layout.share_prompts,
    plan=plan,
  )


class PackingTest(parameterized.TestCase):
  def test_first_fit_by_hand(self):
    self.assertEqual(
      packing.first_fit([4, 8, 1, 4, 2, 1], 10), [[1, 4], [0, 3, 2, 5]]
    )
    self.assertEqual(packing.first_fit([], 10), [])

  def test_each_size_is_placed_once_and_no_row_overflows(self):
    rng = np.random.default_rng(0)
    for _ in range(20):
      capacity = int(rng.integers(10, 200))
      sizes = rng.integers(1, capacity + 1, size=int(rng.integers(1, 80)))
      rows = packing.first_fit(sizes.tolist(), capacity)
      self.assertEqual(
        sorted(i for row in rows for i in row), list(range(len(sizes)))
      )
      self.assertLessEqual(max(sizes[row].sum() for row in rows), capacity)
      # Two rows that are half full at most would have been one.
      least = -(-sizes.sum() // capacity)
      self.assertLessEqual(len(rows), 11 / 9 * max(least, 1) + 6 / 9 + least)

  @parameterized.parameters(
    # needed, pack_rows, minibatches, shards -> rows, micro-batches
    (0, 8, 1, 1, 1, 1),
    (3, 8, 1, 1, 3, 1),
    (13, 4, 1, 1, 14, 7),
    (17, 32, 1, 1, 18, 1),
    (50, 8, 1, 1, 52, 13),
    (100, 8, 1, 1, 104, 13),
    (5, 8, 1, 4, 8, 1),
    (9, 8, 2, 2, 12, 1),
  )
  def test_number_of_rows(self, needed, most, minibatches, shards, rows, parts):
    layout = packing.Layout(
      1, pack_rows=most, num_minibatches=minibatches, num_shards=shards
    )
    self.assertEqual(packing.num_rows(needed, layout), rows)
    self.assertEqual(
      packing.num_micro_batches(rows // minibatches, layout), parts
    )

  def test_shapes_are_few_and_padding_is_bounded(self):
    layout = packing.Layout(1, pack_rows=16)
    totals = [packing.num_rows(needed, layout) for needed in range(1, 257)]
    self.assertLessEqual(len(set(totals)), 48)
    for needed, rows in enumerate(totals, 1):
      self.assertLessEqual(rows, 1.25 * needed)
      parts = packing.num_micro_batches(rows, layout)
      self.assertEqual(rows % parts, 0)
      self.assertLessEqual(rows // parts, 16)

  def test_rows_by_hand(self):
    groups = groups_lib.literal_groups()  # 2 + (3, 1) and 1 + (1, 2) tokens.
    ones = np.ones((2, 2), np.float32)
    layout = packing.Layout(1, pack_tokens=8)
    plan, length = batching.plan_rows(groups, layout)
    rows = batching.build_trajectories(
      groups, ones, row_length=length, pad_token=9, plan=plan
    )
    np.testing.assert_array_equal(
      rows.tokens, [[7, 8, 1, 2, 3, 7, 8, 5], [6, 2, 4, 6, 1, 9, 9, 9]]
    )
    np.testing.assert_array_equal(
      rows.segment_ids, [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
      rows.positions, [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
      rows.behavior_log_probs,
      np.where(rows.completion_mask, -rows.tokens / 10, 0).astype('f4'),
    )

    layout = packing.Layout(1, share_prompts=True, pack_tokens=10)
    plan, length = batching.plan_rows(groups, layout)
    rows = batching.build_trajectories(
      groups,
      ones,
      row_length=length,
      pad_token=9,
      share_prompts=True,
      plan=plan,
    )
    np.testing.assert_array_equal(rows.tokens, [[7, 8, 1, 2, 3, 5, 6, 1, 2, 4]])
    np.testing.assert_array_equal(
      rows.segment_ids, [[1, 1, 2, 2, 2, 3, 4, 5, 6, 6]]
    )
    np.testing.assert_array_equal(
      rows.prefix_ids, [[0, 0, 1, 1, 1, 1, 0, 4, 4, 4]]
    )
    np.testing.assert_array_equal(
      rows.positions, [[0, 1, 2, 3, 4, 2, 0, 1, 1, 2]]
    )
    np.testing.assert_array_equal(
      rows.predecessors, [[0, 0, 1, 2, 3, 1, 5, 6, 6, 8]]
    )

  @parameterized.product(
    share_prompts=(False, True), pack_tokens=(1024, 1536, 4096)
  )
  def test_a_skewed_batch_leaves_little_padding(
    self, share_prompts, pack_tokens
  ):
    groups = _skewed_groups(32, 16)
    layout = packing.Layout(8, share_prompts, pack_tokens, pack_rows=4)
    rows = _rows(groups, layout)
    fraction = packing.real_token_fraction(rows.segment_ids)
    self.assertGreater(fraction, 0.9)
    unpacked = _rows(groups, packing.Layout(8))
    self.assertLess(packing.real_token_fraction(unpacked.segment_ids), 0.2)
    # Nothing is lost, and no prompt is copied more often than need be.
    mask = np.asarray(rows.completion_mask)
    self.assertEqual(mask.sum(), np.asarray(unpacked.completion_mask).sum())
    prompts = ((rows.segment_ids > 0) & ~mask).sum()
    if share_prompts:
      self.assertLess(prompts, 3 * _PROMPT * len(groups))

  def test_training_does_not_notice(self):
    """Loss and gradient of a skewed batch equal the unpacked ones."""
    groups = _skewed_groups(4, 8)
    loss_fn = registry.make_loss(
      'aipo',
      max_importance_ratio=2.0,
      clip_low=0.2,
      clip_high=0.2,
      reduction='sequence',
      constant_length=5,
    )
    optimizer = optax.sgd(1.0)
    params = jax.jit(llama.init_params, static_argnums=0)(
      _CONFIG, jax.random.key(0)
    )
    results = []
    for layout, micro_batches in (
      (packing.Layout(8), 8),
      (packing.Layout(8, pack_tokens=1024, pack_rows=2), None),
    ):
      rows = _rows(groups, layout)
      if micro_batches is None:
        self.assertGreater(packing.real_token_fraction(rows.segment_ids), 0.9)
        micro_batches = functools.partial(
          packing.num_micro_batches, layout=layout
        )
      step = steps.make_train_step(
        _CONFIG,
        loss_fn,
        optimizer,
        temperature=1.0,
        max_completion=1024,
        num_micro_batches=micro_batches,
      )
      state = states.init_train_state(params, optimizer)
      state, metrics = step(state, rows)
      # With plain gradient descent the update is the gradient.
      gradient = jax.tree.map(np.subtract, params, state.params)
      results.append((gradient, {k: metrics[k] for k in ('loss', 'entropy')}))
    chex.assert_trees_all_close(*results, atol=1e-5)

  def test_supervised_examples_are_packed(self):
    examples = [([1, 2], [3]), ([4], [5, 6, 1]), ([2], [2])]
    layout = packing.Layout(1, pack_tokens=6, share_prompts=True)
    rows = supervised.supervised_trajectories(
      examples, layout=layout, pad_token=0
    )
    np.testing.assert_array_equal(
      rows.tokens, [[4, 5, 6, 1, 2, 2], [1, 2, 3, 0, 0, 0]]
    )
    np.testing.assert_array_equal(
      rows.segment_ids, [[1, 1, 1, 1, 2, 2], [1, 1, 1, 0, 0, 0]]
    )
    self.assertIsNone(rows.prefix_ids)

  def test_a_sequence_longer_than_a_row_is_named(self):
    layout = packing.Layout(1, pack_tokens=4)
    with self.assertRaisesRegex(
      ValueError, 'group 4 has a sequence of 5 tokens .* raise'
    ):
      batching.plan_rows(groups_lib.literal_groups(), layout)
