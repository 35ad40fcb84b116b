"""The generator: decodes completions in slots, one bounded segment a step.

New weights are fetched into a spare buffer while decoding goes on, and taken
up between two segments on the controller's command; what is unfinished then
goes on under the new weights (a partial rollout, LlamaRL section 3).
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp

from llamarl_jax import types
from llamarl_jax.channels import registry as channels
from llamarl_jax.channels import weights
from llamarl_jax.data import tokenizers
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import kv_cache
from llamarl_jax.models import llama
from llamarl_jax.sampling import decoding
from llamarl_jax.sampling import segments
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules
from llamarl_jax.sharding import spec

# How long a step without work waits for a fetch before it reports back.
_IDLE_SECONDS = 0.05
_POLL_SECONDS = 0.002


@dataclasses.dataclass(frozen=True)
class GeneratorSettings:
  """Plain settings of a generator.

  Attributes:
    model: sizes of the network.
    mesh: size of the axis tensor.
    tokenizer: for stop tokens and for the text of completions.
    seed: of the sampling keys.
    num_slots: completions decoded side by side (S).
    segment_length: decode steps of one segment.
    max_prompt_length: tokens of the longest prompt.
    max_new_tokens: tokens of the longest completion.
    compute_dtype: of the factors of matrix products, and of the cache.
  """

  model: config_lib.LlamaConfig
  mesh: Mapping[str, int]
  tokenizer: tokenizers.Tokenizer
  seed: int
  num_slots: int
  segment_length: int
  max_prompt_length: int
  max_new_tokens: int
  compute_dtype: str = 'float32'


@dataclasses.dataclass
class _OpenGroup:
  """A request that is being answered."""

  request: types.Request
  done: dict[int, types.Completion]


class GeneratorExecutor:
  """Answers requests with completions; see `types.Executor`."""

  def __init__(
    self,
    *,
    devices: Sequence[jax.Device],
    name: str,
    settings: GeneratorSettings,
    transport: str = '',
    transport_settings: weights.TransportSettings | None = None,
  ):
    """Allocates slots; the parameters come by the first publication.

    Args:
      devices: of its mesh.
      name: of the replica, for people.
      settings: see GeneratorSettings.
      transport: name of the weight transport; empty for none, then parameters
        are given to `adopt`.
      transport_settings: of that transport.
    """
    self._settings = settings
    mesh = mesh_lib.make_mesh(settings.mesh, devices)
    specs = llama.abstract_params(settings.model)
    self.param_shardings, _ = rules.shardings(
      specs, mesh, rules.GENERATOR_RULES
    )
    self._subscriber: weights.WeightSubscriber | None = None
    if transport:
      self._subscriber = channels.TRANSPORTS[transport].subscriber(
        name,
        specs,
        self.param_shardings,
        transport_settings or weights.TransportSettings(),
      )
    self.abstract_params = jax.tree.map(
      lambda s, sharding: jax.ShapeDtypeStruct(
        s.shape, s.dtype, sharding=sharding
      ),
      specs,
      self.param_shardings,
    )
    self._key = jax.device_put(
      jax.random.key(settings.seed), rules.replicated(mesh)
    )
    self._state = _empty_slots(settings, mesh)
    self._policy: types.VersionedParams | None = None
    self._spare: types.VersionedParams | None = None
    self._fetch_started: float | None = None
    self._waiting: collections.deque[types.Request] = collections.deque()
    self._open: dict[tuple[int, int], _OpenGroup] = {}
    # Slot -> (stream, admission index, sample index) of what it decodes.
    self._slots: dict[int, tuple[int, int, int]] = {}

  def adopt(self, policy: types.VersionedParams) -> None:
    """Takes parameters at once, without a publication."""
    self._policy = policy

  def destination(self) -> weights.Destination:
    """Returns where this replica needs its parameters."""
    return self._require_subscriber().request()

  def begin_fetch(self, manifest: weights.Manifest) -> None:
    """Starts to fetch a publication into the spare buffer."""
    self._spare = None
    self._require_subscriber().begin(manifest)
    self._fetch_started = time.time()

  def step(
    self,
    inputs: Sequence[types.Request],
    commit_version: types.Version | None,
  ) -> types.StepReport:
    """Flips weights if told to, fills slots and decodes one segment.

    Args:
      inputs: requests to answer, in admission order.
      commit_version: a version it reported as fetched, or None to stay.

    Returns:
      The groups that were finished, without rewards.

    Raises:
      ValueError: the version is not there, or there are no parameters yet.
    """
    spans: list[types.Span] = []
    metrics: dict[str, float] = {}
    if commit_version is not None:
      spans.append(self._commit(commit_version))
    if self._policy is None and inputs:
      raise ValueError('no parameters yet: commit a version first')
    self._waiting.extend(inputs)
    outputs: list[types.Group] = []
    status = types.Status.STARVED
    if self._waiting or self._slots:
      status = types.Status.PROGRESSED
      segment, outputs = self._segment()
      spans.append(segment)
    self._poll_fetch(spans, metrics, wait=status == types.Status.STARVED)
    return types.StepReport(
      status,
      outputs=outputs,
      metrics=metrics,
      spans=spans,
      fetched=self._spare.version if self._spare else None,
    )

  def digest(self) -> str:
    """Returns a digest of the parameters in use; equals the trainer's."""
    return digest.params_digest(self._params_and_version()[0])

  def state(self) -> Mapping[str, Any]:
    """Returns nothing: what is unfinished is sampled again, at its index."""
    return {}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Has nothing to restore."""
    del state

  def close(self) -> None:
    """Ends the subscription and frees parameters."""
    if self._subscriber is not None:
      self._subscriber.close()
    self._policy = self._spare = None

  def _require_subscriber(self) -> weights.WeightSubscriber:
    if self._subscriber is None:
      raise ValueError('this generator has no weight transport')
    return self._subscriber

  def _commit(self, version: types.Version) -> types.Span:
    start = time.time()
    if self._spare is None or self._spare.version != version:
      held = self._spare.version if self._spare else None
      raise ValueError(f'told to commit {version}, but the spare is {held}')
    if self._policy is not None and version <= self._policy.version:
      raise ValueError(
        f'told to commit {version} over {self._policy.version}: versions must'
        ' increase'
      )
    self._policy, self._spare = self._spare, None
    return types.Span(
      'commit', start, time.time(), {'version': version.batches}
    )

  def _poll_fetch(
    self, spans: list[types.Span], metrics: dict[str, float], *, wait: bool
  ) -> None:
    """Takes a fetch that has arrived; waits a moment for it if idle."""
    if self._fetch_started is None:
      return
    subscriber = self._require_subscriber()
    limit = time.time() + (_IDLE_SECONDS if wait else 0.0)
    while not (ready := subscriber.ready()) and time.time() < limit:
      time.sleep(_POLL_SECONDS)
    if not ready:
      return
    self._spare = subscriber.take()
    report = subscriber.report
    spans.append(
      types.Span(
        'fetch',
        self._fetch_started,
        time.time(),
        {'version': self._spare.version.batches},
      )
    )
    if report is not None:
      metrics['fetch_bytes'] = report.bytes
      metrics['fetch_seconds'] = report.seconds
    self._fetch_started = None

  def _segment(self) -> tuple[types.Span, list[types.Group]]:
    """Fills free slots, decodes, and collects what is finished."""
    start = time.time()
    params, version = self._params_and_version()
    self._fill_slots(params)
    num_active = len(self._slots)
    self._state = decoding.decode_segment(
      self._settings.model,
      params,
      self._state,
      self._key,
      jnp.int32(version),
      num_steps=self._settings.segment_length,
      stop_tokens=self._settings.tokenizer.stop_ids,
      compute_dtype=self._settings.compute_dtype,
    )
    outputs, num_tokens = self._harvest()
    span = types.Span(
      'segment',
      start,
      time.time(),
      {'version': version, 'slots': num_active, 'finished_tokens': num_tokens},
    )
    return span, outputs

  def _params_and_version(self) -> tuple[types.Params, int]:
    if self._policy is None:
      raise ValueError('no parameters yet: commit a version first')
    return self._policy.params, self._policy.version.batches

  def _fill_slots(self, params: types.Params) -> None:
    """Prefills waiting requests into free slots, whole groups at a time."""
    settings = self._settings
    free = [s for s in range(settings.num_slots) if s not in self._slots]
    assignments: list[segments.Assignment] = []
    while self._waiting and len(free) >= self._waiting[0].num_samples:
      request = self._waiting.popleft()
      place = (int(request.stream), request.admission_index)
      self._open[place] = _OpenGroup(request, {})
      for sample in range(request.num_samples):
        slot = free.pop(0)
        self._slots[slot] = (*place, sample)
        assignments.append(segments.Assignment(request, sample, slot))
    if assignments:
      filling = segments.pack(
        assignments,
        num_slots=settings.num_slots,
        max_prompt=settings.max_prompt_length,
        max_new=settings.max_new_tokens,
      )
      self._state = decoding.insert(
        settings.model,
        params,
        self._state,
        filling,
        compute_dtype=settings.compute_dtype,
      )

  def _harvest(self) -> tuple[list[types.Group], int]:
    """Returns the groups that are complete now, and the tokens collected."""
    outputs = []
    num_tokens = 0
    for done in segments.harvest(self._state, sorted(self._slots)):
      del self._slots[done.slot]
      num_tokens += done.tokens.size
      place = (int(done.stream), done.admission_index)
      group = self._open[place]
      group.done[done.sample_index] = types.Completion(
        admission_index=done.admission_index,
        sample_index=done.sample_index,
        tokens=done.tokens,
        log_probs=done.log_probs,
        versions=done.versions,
        finish_reason=done.finish_reason,
        text=self._settings.tokenizer.decode(done.tokens.tolist()),
      )
      if len(group.done) == group.request.num_samples:
        del self._open[place]
        completions = [c for _, c in sorted(group.done.items())]
        outputs.append(types.Group(group.request, tuple(completions)))
    return outputs, num_tokens


def cache_spec(settings: GeneratorSettings) -> spec.ParamSpec:
  """Returns what is known of the keys (or the values) of all slots."""
  model = settings.model
  capacity = settings.max_prompt_length + settings.max_new_tokens
  shape = (
    model.num_layers,
    settings.num_slots,
    capacity,
    model.num_kv_heads,
    model.head_dim,
  )
  dtype = jnp.dtype(settings.compute_dtype)
  return spec.ParamSpec(shape, dtype, kv_cache.LOGICAL_AXES)


def _empty_slots(
  settings: GeneratorSettings, mesh: jax.sharding.Mesh
) -> decoding.DecodeState:
  """Returns slots whose cache is sharded, and all else replicated."""

  def make() -> decoding.DecodeState:
    return decoding.init_state(
      settings.model,
      settings.num_slots,
      settings.max_prompt_length,
      settings.max_new_tokens,
      jnp.dtype(settings.compute_dtype),
    )

  cache = jax.sharding.NamedSharding(
    mesh,
    rules.partition_spec(cache_spec(settings), rules.GENERATOR_RULES, mesh),
  )
  abstract = jax.eval_shape(make)
  shardings = dataclasses.replace(
    jax.tree.map(lambda _: rules.replicated(mesh), abstract),
    cache=jax.tree.map(lambda _: cache, abstract.cache),
  )
  return jax.jit(make, out_shardings=shardings)()
