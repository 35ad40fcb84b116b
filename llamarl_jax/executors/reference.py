"""The reference: scores completions under the policy training began from."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import time
from typing import Any

import jax
import numpy as np

from llamarl_jax import types
from llamarl_jax.checkpoints import run_state
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.sharding import activations
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.training import batching
from llamarl_jax.training import packing
from llamarl_jax.training import scoring


@dataclasses.dataclass(frozen=True)
class ReferenceSettings:
  """Plain settings of a reference executor.

  Attributes:
    model: sizes of the network.
    mesh: sizes of the axes data, fsdp and tensor.
    folder: where the trainer kept the first policy.
    temperature: that of the sampler: log-probs are compared with its.
    max_completion: completion tokens that a row may hold.
    pad_token: token id that fills rows.
    layout: how sequences become rows; that of the trainer.
    rows: of one forward pass.
    computation: how the policy is computed; that of the trainer.
  """

  model: config_lib.LlamaConfig
  mesh: Mapping[str, int]
  folder: str
  temperature: float
  max_completion: int
  pad_token: int
  layout: packing.Layout
  rows: int
  computation: scoring.Computation


class ReferenceExecutor:
  """Adds reference log-probs to groups; see `types.Executor`."""

  def __init__(
    self, *, devices: Sequence[jax.Device], settings: ReferenceSettings
  ):
    self._settings = settings
    self._mesh = mesh_lib.make_mesh(settings.mesh, devices)
    self._params: types.Params | None = None
    score = functools.partial(
      scoring.policy_log_probs,
      settings.model,
      temperature=settings.temperature,
      max_completion=settings.max_completion,
      computation=settings.computation,
    )
    self._log_probs = jax.jit(activations.on_mesh(score, self._mesh))

  def load(self) -> None:
    """Reads the policy the trainer kept."""
    specs = llama.abstract_params(self._settings.model)
    shardings, _ = rules.shardings(specs, self._mesh, rules.TRAINER_RULES)
    abstract = jax.tree.map(
      lambda spec, sharding: jax.ShapeDtypeStruct(
        spec.shape, spec.dtype, sharding=sharding
      ),
      specs,
      shardings,
    )
    self._params = run_state.load_params(self._settings.folder, abstract)

  def step(
    self, inputs: Sequence[types.Group], commit_version: types.Version | None
  ) -> types.StepReport:
    """Returns the groups with reference log-probs, in the same order.

    Args:
      inputs: scored groups.
      commit_version: not used: the reference policy stays.
    """
    del commit_version
    if self._params is None:
      raise ValueError('the reference policy is not loaded; call load() first')
    if not inputs:
      return types.StepReport(types.Status.STARVED)
    start = time.time()
    settings = self._settings
    plan, row_length = batching.plan_rows(inputs, settings.layout)
    rows, places = batching.lay_out(
      inputs,
      plan,
      row_length=row_length,
      pad_token=settings.pad_token,
      share_prompts=settings.layout.share_prompts,
    )
    log_probs = self._score(rows)
    nothing = np.zeros(0, np.float32)
    outputs = [
      dataclasses.replace(
        group,
        reference_log_probs=tuple(
          # A completion without tokens has no place.
          log_probs[places[n, i]] if (n, i) in places else nothing
          for i in range(len(group.completions))
        ),
      )
      for n, group in enumerate(inputs)
    ]
    span = types.Span('reference', start, time.time(), {'rows': len(plan)})
    return types.StepReport(
      types.Status.PROGRESSED, outputs=outputs, spans=[span]
    )

  def state(self) -> Mapping[str, Any]:
    """Returns nothing: the policy lies in its folder."""
    return {}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Has nothing to restore."""
    del state

  def close(self) -> None:
    """Frees the parameters."""
    self._params = None

  def _score(self, rows: types.Trajectories) -> np.ndarray:
    """Returns f32[R, T], computed in parts of one shape."""
    size = self._settings.rows
    total = rows.tokens.shape[0]
    parts = []
    for begin in range(0, total, size):
      part = jax.tree.map(
        lambda x, begin=begin: _padded(x[begin : begin + size], size), rows
      )
      part = jax.device_put(part, rules.batch_sharding(self._mesh))
      log_probs, _ = self._log_probs(self._params, part)
      parts.append(np.asarray(log_probs))
    return np.concatenate(parts)[:total]


def _padded(x: np.ndarray, rows: int) -> np.ndarray:
  """Returns `x` with rows of zeros added: segment 0 is padding."""
  return np.pad(x, [(0, rows - len(x))] + [(0, 0)] * (x.ndim - 1))
