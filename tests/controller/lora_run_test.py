"""A whole run that trains adapters, under the local launcher."""

import dataclasses
import io
import json

from absl.testing import parameterized
import jax
import numpy as np
import pytest

from experiments import train
from llamarl_jax.checkpoints import run_policy
from llamarl_jax.controller import checks
from llamarl_jax.controller import problems
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import spec
from tests.oracles import tiny

_WINDOW = 20


def _config():
  # Sums of two numbers up to 3, guessed right by a random policy 1 time in 30.
  return tiny.get_config(
    num_steps=4 * _WINDOW,
    problems__max_value=3,
    problems__held_out_fraction=0.3,
    trainer__lora_rank=4,
    trainer__lora_alpha=8.0,
  )


class LoRARunTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _workdir(self, tmp_path):
    self.path = tmp_path

  def test_learns_and_publishes_the_policy_it_trains(self):
    config = _config()
    summary = train.run(config, self.path, stream=io.StringIO())
    lines = (self.path / 'metrics.jsonl').read_text().splitlines()
    records = [json.loads(line) for line in lines]
    steps = [record for record in records if 'loss' in record]
    rewards = [record['reward_mean'] for record in steps]
    # Measured: 0.07 and 0.33, means of 640 completions each.
    self.assertLess(np.mean(rewards[:_WINDOW]), 0.12)
    self.assertGreater(np.mean(rewards[-_WINDOW:]), 0.2)
    # The sampler has merged weights, the trainer adapters beside them: they
    # differ in rounding alone, as do cached and whole forward passes.
    self.assertLess(max(record['log_prob_gap'] for record in steps), 2e-5)
    self.assertEqual(
      summary['replica_digests'], {'generator_0': summary['parameter_digest']}
    )

    model = problems.load_model(config).source.model
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
      lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=device),
      llama.abstract_params(model),
    )
    self._check_checkpoint(config, model, abstract)
    merged = run_policy.load_merged(self.path / 'checkpoints', model, abstract)
    self.assertEqual(digest.params_digest(merged), summary['parameter_digest'])

  def _check_checkpoint(self, config, model, abstract):
    """Both are kept: weights as they were at first, and trained adapters."""
    trained, params = run_policy.load_adapted(
      self.path / 'checkpoints', model, abstract
    )
    self.assertEqual(trained.lora, checks.lora(config))
    adapters, frozen = lora.split_trainable(params)
    first = jax.jit(llama.init_params, static_argnums=0)(
      model, jax.random.key(config.seed)
    )
    jax.tree.map(np.testing.assert_array_equal, frozen, first)
    for name, leaf in spec.named_leaves(adapters).items():
      self.assertGreater(np.abs(leaf).max(), 0.0, name)


class MetadataTest(parameterized.TestCase):
  def test_a_checkpoint_of_other_adapters_is_refused(self):
    model = problems.load_model(_config()).source.model
    adapted = dataclasses.replace(model, lora=checks.lora(_config()))
    metadata = json.loads(json.dumps(run_policy.lora_metadata(adapted)))
    run_policy.check_lora(adapted, metadata)
    run_policy.check_lora(model, {'incarnation': 0})
    other = dataclasses.replace(adapted.lora, alpha=16.0)
    for wrong in (model, dataclasses.replace(adapted, lora=other)):
      with self.assertRaisesRegex(ValueError, 'alpha.*8.0.*trainer.lora_rank'):
        run_policy.check_lora(wrong, metadata)

  @parameterized.parameters(
    ({'trainer__lora_rank': -1}, 'lora_rank=-1.*0 or more'),
    ({'trainer__lora_alpha': 0.0}, 'lora_alpha=0.0.*above 0'),
    ({'trainer__lora_targets': 'query,q_proj'}, 'q_proj.*query,key,value'),
    ({'trainer__lora_targets': 'up,up'}, 'up,up.*once'),
    ({'trainer__lora_targets': ''}, "lora_targets=''"),
  )
  def test_a_wrong_field_is_named(self, changes, message):
    config = tiny.get_config(**({'trainer__lora_rank': 4} | changes))
    with self.assertRaisesRegex(ValueError, message):
      checks.check_config(config)
