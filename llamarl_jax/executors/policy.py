"""Where the parameters of a policy come from, as a plain value.

Sent to the executors that hold parameters of their own; each makes its shards
directly where they are to live.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses

import jax

from llamarl_jax import types
from llamarl_jax.checkpoints import gguf
from llamarl_jax.checkpoints import hf
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama


@dataclasses.dataclass(frozen=True)
class PolicySource:
  """A model and the origin of its parameters.

  Attributes:
    model: sizes of the network.
    kind: a key of LOADERS.
    path: of the model file or folder; empty where there is none.
    seed: of a random initialization.
  """

  model: config_lib.LlamaConfig
  kind: str
  path: str
  seed: int


def _from_scratch(
  source: PolicySource, shardings: types.Params
) -> types.Params:
  initialize = jax.jit(
    lambda key: llama.init_params(source.model, key), out_shardings=shardings
  )
  return initialize(jax.random.key(source.seed))


def _from_gguf(source: PolicySource, shardings: types.Params) -> types.Params:
  params = gguf.load_params(source.path, source.model)
  return jax.tree.map(jax.device_put, params, shardings)


def _from_hf(source: PolicySource, shardings: types.Params) -> types.Params:
  return hf.load_params(source.path, source.model, shardings)


LOADERS: Mapping[str, Callable[[PolicySource, types.Params], types.Params]] = {
  'scratch': _from_scratch,
  'gguf': _from_gguf,
  'hf': _from_hf,
}


def load(source: PolicySource, shardings: types.Params) -> types.Params:
  """Returns the parameters, f32, laid out as `shardings` says.

  Args:
    source: the model and where it comes from.
    shardings: a sharding for each parameter.
  """
  return LOADERS[source.kind](source, shardings)
