"""Low-rank adapters: which leaves are trained, and how they join the weights.

Hu et al. (2021), https://arxiv.org/abs/2106.09685. A projection W with an
adapter computes x W + scale (x A) B; its leaves A and B lie beside it in the
tree of parameters, under its name with a suffix.
"""

import dataclasses
import math

import chex
from flax import traverse_util
import jax
import jax.numpy as jnp

from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.types import Params

LoRAConfig = config_lib.LoRAConfig

_FIRST, _SECOND = '_lora_a', '_lora_b'


def split_trainable(params: Params) -> tuple[Params, Params]:
  """Returns what is trained and what stays: adapters are trained alone.

  Of a tree without adapters everything is trained.

  Args:
    params: tree as `llama.abstract_params` describes it, of leaves of any kind.

  Returns:
    Two trees that hold each leaf once, under its path; see `combine`.
  """
  leaves = traverse_util.flatten_dict(params)
  adapters = {
    path: leaf
    for path, leaf in leaves.items()
    if path[-1].endswith((_FIRST, _SECOND))
  }
  if not adapters:
    return params, {}
  rest = {path: x for path, x in leaves.items() if path not in adapters}
  unflatten = traverse_util.unflatten_dict
  return unflatten(adapters), unflatten(rest)


def combine(trainable: Params, frozen: Params) -> Params:
  """Returns the tree whose parts `split_trainable` gave."""
  return traverse_util.unflatten_dict(
    traverse_util.flatten_dict(frozen) | traverse_util.flatten_dict(trainable)
  )


def init_adapters(config: config_lib.LlamaConfig, key: chex.PRNGKey) -> Params:
  """Returns the adapters training starts from; see `combine`.

  They add nothing yet: A is drawn, B is 0. Under `jax.jit` nothing else is
  computed.

  Args:
    config: of a model with adapters.
    key: to draw with.
  """
  return split_trainable(llama.init_params(config, key))[0]


def merge(
  config: config_lib.LlamaConfig, params: Params
) -> tuple[config_lib.LlamaConfig, Params]:
  """Returns the same policy without adapters: W + scale A B in place of W.

  Args:
    config: of the model.
    params: its parameters.

  Returns:
    The config without adapters, and parameters as it describes them. What has
    no adapter is passed through; a config without adapters changes nothing.
  """
  if config.lora is None:
    return config, params
  leaves = traverse_util.flatten_dict(split_trainable(params)[1])
  adapters = traverse_util.flatten_dict(split_trainable(params)[0])
  for path, first in adapters.items():
    if not path[-1].endswith(_FIRST):
      continue
    name = path[-1].removesuffix(_FIRST)
    second = adapters[*path[:-1], name + _SECOND]
    place = (*path[:-1], name)
    weight = leaves[place]
    leaves[place] = weight + config.lora.scale * _product(first, second)
  return dataclasses.replace(config, lora=None), traverse_util.unflatten_dict(
    leaves
  )


def _product(first: jax.Array, second: jax.Array) -> jax.Array:
  """Returns A B of each layer, f32[L, *inner, *outer].

  Args:
    first: f32[L, *inner, r].
    second: f32[L, r, *outer].
  """
  layers, *inner, rank = first.shape
  outer = second.shape[2:]
  # Merged weights are to be those trained with, also where float32 products
  # are rounded by default.
  product = jnp.einsum(
    'lir,lro->lio',
    first.reshape(layers, math.prod(inner), rank),
    second.reshape(layers, rank, math.prod(outer)),
    precision=jax.lax.Precision.HIGHEST,
  )
  return product.reshape(layers, *inner, *outer)
