"""What leaves the trainer: merged, quantized, and the same when it arrives."""

import dataclasses
import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from llamarl_jax import types
from llamarl_jax.channels import registry
from llamarl_jax.channels import weights
from llamarl_jax.executors import adapters
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import lora
from llamarl_jax.models import quantization
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules

_CONFIG = config_lib.LlamaConfig(
  vocab_size=16,
  width=8,
  num_layers=1,
  num_heads=2,
  num_kv_heads=2,
  head_dim=4,
  mlp_width=8,
  rope_theta=100.0,
  lora=config_lib.LoRAConfig(rank=2, alpha=4.0),
)
_BARE = dataclasses.replace(_CONFIG, lora=None)


@functools.cache
def _trainer():
  """Returns the trainer's mesh, and parameters laid out over it."""
  mesh = mesh_lib.make_mesh({'fsdp': 2}, jax.devices()[:2])
  specs = llama.abstract_params(_CONFIG)
  shardings, _ = rules.shardings(specs, mesh, rules.TRAINER_RULES)
  generator = np.random.default_rng(0)
  params = jax.tree.map(
    lambda s: generator.normal(0, 0.3, s.shape).astype(np.float32), specs
  )
  return mesh, jax.device_put(params, shardings)


class PublishedTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.path = tmp_path

  @parameterized.product(
    kind=('int8', 'fp8'), transport=('device_put', 'filesystem')
  )
  def test_arrives_as_it_left(self, kind, transport):
    mesh, params = _trainer()
    published = adapters.make_published(
      _CONFIG, mesh, rules.TRAINER_RULES, kind
    )(params)
    specs = quantization.abstract(llama.abstract_params(_BARE), kind)
    destination = mesh_lib.make_mesh({'tensor': 2}, jax.devices()[:2])
    shardings, _ = rules.shardings(specs, destination, rules.GENERATOR_RULES)
    settings = weights.TransportSettings(directory=str(self.path))
    ends = registry.TRANSPORTS[transport]
    publisher = ends.publisher(settings)
    subscriber = ends.subscriber('generator', specs, shardings, settings)
    version = types.Version(0, 1)
    publisher.publish(types.VersionedParams(version, published))
    subscriber.begin(publisher.offer(subscriber.request()))
    while not subscriber.ready():
      pass
    arrived = subscriber.take().params
    subscriber.close()
    publisher.close()

    self.assertEqual(
      digest.params_digest(arrived), digest.params_digest(published)
    )
    merged = jax.jit(lambda p: lora.merge(_CONFIG, p)[1])(params)
    back = quantization.dequantize(arrived, jnp.float32)
    for found, weight in zip(
      jax.tree.leaves(back), jax.tree.leaves(merged), strict=True
    ):
      # Half a step of int8; of fp8 a sixteenth of the largest.
      bound = np.abs(weight).max() / (254 if kind == 'int8' else 16)
      self.assertLessEqual(np.abs(found - weight).max(), bound * 1.001)

  def test_without_adapters_and_kind_nothing_is_copied(self):
    mesh, _ = _trainer()
    params = {'x': jnp.ones(2)}
    publish = adapters.make_published(_BARE, mesh, rules.TRAINER_RULES)
    self.assertIs(publish(params), params)
