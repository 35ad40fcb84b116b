"""The cache of a generator over two devices: shared, and never gathered."""

import re

from absl.testing import parameterized
import jax
import jax.numpy as jnp

from llamarl_jax.data import tokenizers
from llamarl_jax.executors import generator
from llamarl_jax.models import config as config_lib
from llamarl_jax.sampling import decoding

_SLOTS, _PROMPT, _NEW = 6, 8, 5


def _executor(num_heads, num_kv_heads, num_devices):
  tokenizer = tokenizers.CharacterTokenizer()
  settings = generator.GeneratorSettings(
    model=config_lib.LlamaConfig(
      vocab_size=tokenizer.vocab_size,
      width=24,
      num_layers=2,
      num_heads=num_heads,
      num_kv_heads=num_kv_heads,
      head_dim=10,
      mlp_width=32,
      rope_theta=1e4,
    ),
    mesh={'tensor': num_devices},
    tokenizer=tokenizer,
    seed=0,
    num_slots=_SLOTS,
    segment_length=_NEW,
    max_prompt_length=_PROMPT,
    max_new_tokens=_NEW,
  )
  return settings, generator.GeneratorExecutor(
    devices=jax.devices()[:num_devices], name='generator', settings=settings
  )


class GeneratorShardingTest(parameterized.TestCase):
  @parameterized.parameters(
    # Heads divide: each device has one.
    (4, 2, (2, 6, 1, 13, 10)),
    # They do not: each device has half of the slots.
    (3, 3, (2, 3, 3, 13, 10)),
  )
  def test_cache_is_shared(self, num_heads, num_kv_heads, shard):
    settings, executor = _executor(num_heads, num_kv_heads, 2)
    runner = executor._engine._runner
    state = runner.state
    whole = state.cache.k.shape
    self.assertEqual(state.cache.k.sharding.shard_shape(whole), shard)
    compiled = (
      decoding.segment_program('cpu')
      .lower(
        settings.model,
        executor.abstract_params,
        state,
        runner._key,
        jnp.int32(0),
        num_steps=settings.segment_length,
        stop_tokens=(),
        min_active=1,
        read_length=None,
        max_steps=None,
        compute_dtype='float32',
      )
      .compile()
    )
    shapes = {
      tuple(map(int, found.split(',')))
      for found in re.findall(r'f32\[([\d,]+)\]', compiled.as_text())
    }
    self.assertIn(shard, shapes)
    self.assertNotIn(whole, shapes)
    # Nor is the cache of one layer.
    self.assertNotIn(whole[1:], shapes)
    after = jax.tree.leaves(compiled.output_shardings.cache)
    self.assertTrue(all(s.shard_shape(whole) == shard for s in after), after)
