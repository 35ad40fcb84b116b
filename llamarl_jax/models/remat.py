"""What a layer keeps for its backward pass, and what it computes again.

Rematerialization (Chen et al. 2016, https://arxiv.org/abs/1604.06174) trades
arithmetic for memory, layer by layer.
"""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax

LayerFn = Callable[..., Any]


def _none(layer: LayerFn) -> LayerFn:
  return layer


def _full(layer: LayerFn) -> LayerFn:
  return jax.checkpoint(layer)


def _dots(layer: LayerFn) -> LayerFn:
  # Products with weights only: those of attention have a batch dimension, grow
  # with T * T and are cheap to compute again.
  keep = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
  return jax.checkpoint(layer, policy=keep)


# 'none' keeps all that the backward pass reads. 'full' keeps the input of each
# layer and computes the rest again, a third more arithmetic. 'dots' also keeps
# the products with weights: little arithmetic again, and nothing of T * T.
POLICIES: Mapping[str, Callable[[LayerFn], LayerFn]] = {
  'none': _none,
  'dots': _dots,
  'full': _full,
}
