"""The generator: decodes completions in slots, one bounded segment a step.

New weights are fetched into a spare buffer while decoding goes on, and taken
up between two segments on the controller's command; what is unfinished then
goes on under the new weights (a partial rollout, LlamaRL section 3).
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import logging
import time
from typing import Any

import jax

from llamarl_jax import types
from llamarl_jax.channels import registry as channels
from llamarl_jax.channels import weights
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import adapters
from llamarl_jax.models import config as config_lib
from llamarl_jax.models import llama
from llamarl_jax.models import quantization
from llamarl_jax.sampling import engine as engine_lib
from llamarl_jax.sampling import plan as plan_lib
from llamarl_jax.sampling import segments
from llamarl_jax.sharding import digest
from llamarl_jax.sharding import mesh as mesh_lib
from llamarl_jax.sharding import rules

_LOGGER = logging.getLogger(__name__)

# What becomes of the cache of unfinished completions under new weights.
REFRESH = ('keep', 'prefill')

# How long a step without work waits for a fetch before it reports back.
_IDLE_SECONDS = 0.05
_POLL_SECONDS = 0.002
# Fetches that may fail one after another before the generator gives up.
_MAX_FAILURES = 4


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
    compute_dtype: of the factors of matrix products.
    prefill_tokens: of prompts, read between two segments while completions
      wait to go on; see `plan.EngineSettings`, as for the next two.
    cache_bytes: budget of keys and values; 0 = what the slots need.
    cache_dtype: of keys and values; empty = `compute_dtype`.
    refresh_cache: 'keep' goes on with keys and values of the weights that made
      them, 'prefill' computes them again under new weights.
    max_versions: policy versions that may sample one completion; 0 = any.
    quantization: of the weights that are published; empty = none.
    warm_up: compile everything when the first weights come, not on first use.
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
  prefill_tokens: int = 512
  cache_bytes: int = 0
  cache_dtype: str = ''
  refresh_cache: str = 'keep'
  max_versions: int = 0
  quantization: str = ''
  warm_up: bool = False


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
    served = quantization.abstract(specs, settings.quantization)
    served_shardings, _ = rules.shardings(served, mesh, rules.GENERATOR_RULES)
    self._subscriber: weights.WeightSubscriber | None = None
    if transport:
      self._subscriber = channels.TRANSPORTS[transport].subscriber(
        name,
        served,
        served_shardings,
        transport_settings or weights.TransportSettings(),
      )
    self.abstract_params = jax.tree.map(
      lambda s, sharding: jax.ShapeDtypeStruct(
        s.shape, s.dtype, sharding=sharding
      ),
      specs,
      self.param_shardings,
    )
    self._engine = engine_lib.Engine(
      settings.model,
      engine_settings(settings),
      key=jax.random.key(settings.seed),
      stop_tokens=settings.tokenizer.stop_ids,
      decode_text=settings.tokenizer.decode,
      mesh=mesh,
    )
    self._published = adapters.make_published(
      settings.model, mesh, rules.GENERATOR_RULES, settings.quantization
    )
    self._policy: types.VersionedParams | None = None
    self._spare: types.VersionedParams | None = None
    self._fetch_started: float | None = None
    self._num_failures = 0
    self._is_warm = not settings.warm_up
    # By stream and admission index.
    self._open: dict[tuple[types.Stream, int], _OpenGroup] = {}

  def adopt(self, policy: types.VersionedParams) -> None:
    """Takes parameters at once, without a publication.

    Args:
      policy: laid out as `param_shardings` say, not quantized yet.
    """
    params = self._published(policy.params)
    self._policy = types.VersionedParams(policy.version, params)

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
    self._engine.submit(inputs)
    self._open.update({_place(r): _OpenGroup(r, {}) for r in inputs})
    outputs: list[types.Group] = []
    status = types.Status.STARVED
    if self._open:
      status = types.Status.PROGRESSED
      segment, outputs = self._segment()
      spans.append(segment)
    failed = self._poll_fetch(
      spans, metrics, wait=status == types.Status.STARVED
    )
    return types.StepReport(
      status,
      outputs=outputs,
      metrics=metrics,
      spans=spans,
      fetched=self._spare.version if self._spare else None,
      unfinished=self._engine.num_running + self._engine.num_waiting,
      fetch_failed=failed,
    )

  def digest(self) -> str:
    """Returns a digest of the parameters in use; equals the trainer's."""
    return digest.params_digest(self._params_and_version()[0])

  def state(self) -> Mapping[str, Any]:
    """Returns what is unfinished, as host values."""
    return {
      'groups': [
        (group.request, tuple(group.done.values()))
        for group in self._open.values()
      ],
      'unfinished': self._engine.suspend(),
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on with what was unfinished, under the weights it gets here."""
    for request, done in state['groups']:
      group = _OpenGroup(request, {c.sample_index: c for c in done})
      self._open[_place(request)] = group
    self._engine.resume(state['unfinished'])

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
    if self._policy is not None and self._settings.refresh_cache == 'prefill':
      self._engine.refresh()
    self._policy, self._spare = self._spare, None
    return types.Span(
      'commit', start, time.time(), {'version': version.batches}
    )

  def _poll_fetch(
    self, spans: list[types.Span], metrics: dict[str, float], *, wait: bool
  ) -> bool:
    """Takes a fetch that has arrived; waits a moment for it if idle.

    Returns:
      Whether it failed.
    """
    if self._fetch_started is None:
      if wait:  # For the next command, which may come at once.
        time.sleep(_POLL_SECONDS)
      return False
    subscriber = self._require_subscriber()
    limit = time.time() + (_IDLE_SECONDS if wait else 0.0)
    try:
      while not (ready := subscriber.ready()) and time.time() < limit:
        time.sleep(_POLL_SECONDS)
      if not ready:
        return False
      self._spare = subscriber.take()
    except weights.WeightTransferError as error:
      self._note_failure(error)
      return True
    self._num_failures = 0
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
    return False

  def _note_failure(self, error: weights.WeightTransferError) -> None:
    """Goes on with the weights in use; the controller offers new ones again."""
    self._num_failures += 1
    if self._num_failures >= _MAX_FAILURES:
      raise error
    _LOGGER.warning('a fetch of weights failed, it is tried again: %s', error)
    self._fetch_started = None

  def _segment(self) -> tuple[types.Span, list[types.Group]]:
    """Lets the engine work, and collects the groups that are complete."""
    start = time.time()
    params, version = self._params_and_version()
    if not self._is_warm:
      self._engine.warm_up(params)
      self._is_warm = True
    finished, stats = self._engine.segment(params, version)
    span = types.Span(
      'segment',
      start,
      time.time(),
      {
        'version': version,
        'slots': stats.num_active,
        'steps': stats.num_steps,
        'tokens': stats.num_tokens,
        'prefill_tokens': stats.prefill_tokens,
      },
    )
    return span, self._collect(finished)

  def _params_and_version(self) -> tuple[types.Params, int]:
    if self._policy is None:
      raise ValueError('no parameters yet: commit a version first')
    return self._policy.params, self._policy.version.batches

  def _collect(
    self, finished: Sequence[segments.Finished]
  ) -> list[types.Group]:
    """Returns the groups that these completions complete."""
    outputs = []
    for request, completion in finished:
      group = self._open[_place(request)]
      group.done[completion.sample_index] = completion
      if len(group.done) == request.num_samples:
        del self._open[_place(request)]
        completions = [c for _, c in sorted(group.done.items())]
        outputs.append(types.Group(group.request, tuple(completions)))
    return outputs


def _place(request: types.Request) -> tuple[types.Stream, int]:
  return request.stream, request.admission_index


def engine_settings(settings: GeneratorSettings) -> plan_lib.EngineSettings:
  """Returns what concerns the engine."""
  return plan_lib.EngineSettings(
    num_slots=settings.num_slots,
    segment_length=settings.segment_length,
    max_prompt=settings.max_prompt_length,
    max_new=settings.max_new_tokens,
    prefill_tokens=settings.prefill_tokens,
    cache_bytes=settings.cache_bytes,
    cache_dtype=settings.cache_dtype,
    compute_dtype=settings.compute_dtype,
    max_versions=settings.max_versions,
  )


def cache_plan(settings: GeneratorSettings) -> plan_lib.CachePlan:
  """Returns the caches that a generator will hold.

  Raises:
    ValueError: the byte budget does not hold one slot.
  """
  return plan_lib.make_plan(settings.model, engine_settings(settings))
