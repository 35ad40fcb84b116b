"""The engine of a generator: continuous batching over decode slots.

Requests are answered in bounded segments. Before each, slots that fell free
are filled, one by one: a prompt is prefilled once, in bounded chunks, into a
line of its own, and copied to the slot of each of its completions. Weights may
change between two segments; what is unfinished goes on under the new ones.
"""

import collections
from collections.abc import Sequence
import dataclasses
import heapq

import chex
import jax

from llamarl_jax import types
from llamarl_jax.models import config as config_lib
from llamarl_jax.sampling import plan as plan_lib
from llamarl_jax.sampling import prefilling
from llamarl_jax.sampling import runner as runner_lib
from llamarl_jax.sampling import segments
from llamarl_jax.sampling import stopping
from llamarl_jax.sharding import mesh as mesh_lib


@dataclasses.dataclass(eq=False)
class _Asked:
  """A request of which some samples have no slot yet."""

  request: types.Request
  samples: collections.deque[int]


@dataclasses.dataclass(eq=False)
class _Running:
  """A completion in a slot; versions are those that sampled its tokens."""

  request: types.Request
  sample_index: int
  num_new: int = 0
  num_versions: int = 0
  newest: int | None = None


class Engine:
  """Answers requests with completions, a segment at a time."""

  def __init__(
    self,
    config: config_lib.LlamaConfig,
    settings: plan_lib.EngineSettings,
    *,
    key: chex.PRNGKey,
    stop_tokens: Sequence[int],
    decode_text: stopping.Decode,
    mesh: jax.sharding.Mesh | None = None,
  ):
    """Allocates slots and prompt lines.

    Args:
      config: of the model.
      settings: see EngineSettings.
      key: of the run; see `keys.token_keys`.
      stop_tokens: tokens that end a completion.
      decode_text: gives the text of tokens, special tokens left out.
      mesh: where caches live and parameters will be; None = one device.

    Raises:
      ValueError: the byte budget does not hold one slot.
    """
    self.plan = plan_lib.make_plan(config, settings)
    self._settings = settings
    self._decode_text = decode_text
    self._runner = runner_lib.Runner(
      config,
      settings,
      self.plan,
      key=key,
      stop_tokens=stop_tokens,
      mesh=mesh or mesh_lib.make_mesh({'tensor': 1}, jax.devices()[:1]),
    )
    # A segment ends once so many slots fell free while others wait.
    self._refill = max(1, int(self.plan.num_slots * settings.refill_share))
    # All of these in the order in which they came.
    self._waiting: collections.deque[_Asked] = collections.deque()
    self._with_line: list[tuple[_Asked, prefilling.Reading]] = []
    self._suspended: collections.deque[segments.Suspended] = collections.deque()
    self._resuming: list[tuple[segments.Suspended, prefilling.Reading]] = []
    self._running: dict[int, _Running] = {}  # By slot.
    self._finished: list[segments.Finished] = []
    # Heaps: the lowest is taken.
    self._free_slots = list(range(self.plan.num_slots))
    self._free_lines = list(range(self.plan.num_lines))
    self._version: int | None = None
    self._refresh = False

  @property
  def num_running(self) -> int:
    """Completions being decoded."""
    return len(self._running)

  @property
  def num_waiting(self) -> int:
    """Completions that wait for their prompt or for a slot."""
    asked = [*self._waiting, *(asked for asked, _ in self._with_line)]
    counts = [len(one.samples) for one in asked]
    return sum(counts) + len(self._suspended) + len(self._resuming)

  def submit(self, requests: Sequence[types.Request]) -> None:
    """Takes requests, to be answered in their order.

    Raises:
      ValueError: one of them can never be answered; none is taken.
    """
    self._check(requests)
    for request in requests:
      samples = collections.deque(range(request.num_samples))
      self._waiting.append(_Asked(request, samples))

  def segment(
    self, params: types.Params, version: int
  ) -> segments.SegmentResult:
    """Fills slots, decodes, and returns what is finished.

    Args:
      params: of the policy, on the mesh of the engine.
      version: of `params`, recorded with each token.
    """
    self._take_version(version)
    read, padded = self._fill(params)
    stats = segments.SegmentStats(prefill_tokens=read, padded_tokens=padded)
    if self._running:
      active = len(self._running)
      others = self.num_waiting > 0
      slots = self._runner.decode(
        params,
        version,
        positions=[self._places(one) for one in self._running.values()],
        least_active=max(1, active - self._refill + 1) if others else 1,
      )
      lengths = self._harvest(slots)
      stats = stats._replace(
        num_active=active, num_steps=max(lengths), num_tokens=sum(lengths)
      )
    finished, self._finished = self._finished, []
    return segments.SegmentResult(finished, stats)

  def suspend(self) -> list[segments.Suspended]:
    """Returns all that is unfinished as host values; the engine keeps it."""
    slots = self._runner.view()
    begun = [
      *(_completion(slots, s, r) for s, r in self._in_slots()),
      *(one for one, _ in self._resuming),
      *self._suspended,
    ]
    asked = [*(asked for asked, _ in self._with_line), *self._waiting]
    return begun + [
      segments.not_begun(one.request, sample)
      for one in asked
      for sample in one.samples
    ]

  def resume(self, completions: Sequence[segments.Suspended]) -> None:
    """Goes on with completions, before all that waits.

    Raises:
      ValueError: one of them does not fit; none is taken.
    """
    self._check([one.request for one in completions])
    # Those that are not begun share the prefill of their prompt.
    asked: dict[tuple[types.Stream, int], _Asked] = {}
    for one in completions:
      request = one.request
      if one.tokens.size:
        self._suspended.append(one)
        continue
      place = (request.stream, request.admission_index)
      new = _Asked(request, collections.deque())
      asked.setdefault(place, new).samples.append(one.sample_index)
    self._waiting.extendleft(reversed(asked.values()))

  def refresh(self) -> None:
    """Reads again what the slots hold, under the parameters given next."""
    self._refresh = True

  def warm_up(self, params: types.Params) -> None:
    """Compiles all that answering requests will need."""
    self._runner.warm_up(params)

  def _check(self, requests: Sequence[types.Request]) -> None:
    for request in requests:
      plan_lib.check_fits(
        request,
        max_prompt=self._settings.max_prompt,
        max_new=self._settings.max_new,
      )

  def _in_slots(self) -> list[tuple[int, _Running]]:
    return sorted(self._running.items(), key=lambda item: item[0])

  def _places(self, one: _Running) -> tuple[int, int]:
    """Returns the places of the newest token and of the last one read."""
    prompt = len(one.request.prompt_tokens)
    # The last token of all is sampled and never read.
    return prompt + one.num_new - 1, prompt + one.request.max_new_tokens - 2

  # Weights.

  def _take_version(self, version: int) -> None:
    """Ends what spanned enough versions, and marks what is to be read again."""
    changed = version != self._version
    self._version = version
    if changed:
      # A prompt is continued under the weights that read it.
      for _, reading in (*self._with_line, *self._resuming):
        reading.num_read = 0
    spent = [(s, r) for s, r in self._in_slots() if self._is_spent(r)]
    leaving = self._in_slots() if self._refresh else spent
    self._refresh = False
    if not leaving:
      return
    slots = self._runner.view()
    for slot, one in leaving:
      del self._running[slot]
      completion = _completion(slots, slot, one)
      if self._is_spent(one):
        heapq.heappush(self._free_slots, slot)
        self._finish(completion, types.FinishReason.BUDGET)
      else:
        self._resuming.append((completion, _reading(completion, slot)))
    self._runner.release([slot for slot, _ in leaving])

  def _is_spent(self, one: _Running) -> bool:
    """Returns whether a token more would be of one version too many."""
    limit = self._settings.max_versions
    return 0 < limit <= one.num_versions and one.newest != self._version

  # Filling slots.

  def _fill(self, params: types.Params) -> tuple[int, int]:
    """Reads prompts and fills slots; returns tokens read, and with padding.

    Where most slots are being decoded, no more is read than they can wait for;
    where few are, a full batch comes first. A prompt has one chunk of it, in
    either case.
    """
    most = 2 * len(self._running) > self.plan.num_slots
    room = self._settings.prefill_tokens if most else None
    read = padded = 0
    served: list[prefilling.Reading] = []
    while True:
      self._advance()
      if room is None and self._running and not self._free_slots:
        break
      found = self._next_call(served, room)
      if found is None:
        if self._running or not served:
          break
        served = []  # Nothing runs that could be held up by a further chunk.
        continue
      call, into_slots = found
      run = self._runner.read_slots if into_slots else self._runner.read_prompts
      before = sum(reading.num_read for reading in call.readings)
      run(params, call)
      served += call.readings
      read += sum(reading.num_read for reading in call.readings) - before
      padded += call.num_tokens
      room = None if room is None else room - call.num_tokens
    return read, padded

  def _advance(self) -> None:
    """Moves all on that need not wait for a program to read it."""
    self._assign()
    while self._start():  # Which leaves lines to others.
      self._assign()

  def _assign(self) -> None:
    """Gives slots to what is resumed and lines to prompts, while there are."""
    while self._suspended and self._free_slots:
      one = self._suspended.popleft()
      slot = heapq.heappop(self._free_slots)
      self._resuming.append((one, _reading(one, slot)))
    while self._waiting and self._free_lines:
      asked = self._waiting.popleft()
      line = heapq.heappop(self._free_lines)
      tokens = asked.request.prompt_tokens[:-1]
      self._with_line.append((asked, prefilling.Reading(tokens, line)))

  def _next_call(
    self, served: Sequence[prefilling.Reading], room: int | None
  ) -> tuple[prefilling.Call, bool] | None:
    """Returns what to read next, and whether into slots."""
    for queue, shapes, into_slots in (
      (self._resuming, self._runner.slot_shapes, True),
      (self._with_line, self._runner.line_shapes, False),
    ):
      readings = [r for _, r in queue if r.num_left and r not in served]
      call = prefilling.next_call(readings, shapes, room)
      if call is not None:
        return call, into_slots
    return None

  def _start(self) -> bool:
    """Starts to decode what is read; returns whether there was any."""
    resumed = [(c, r.line) for c, r in self._resuming if not r.num_left]
    self._resuming = [(c, r) for c, r in self._resuming if r.num_left]
    going_on = []
    for completion, slot in resumed:
      one = _running(completion)
      if self._is_spent(one):
        heapq.heappush(self._free_slots, slot)
        self._finish(completion, types.FinishReason.BUDGET)
      else:
        self._running[slot] = one
        going_on.append((completion, slot))
    self._runner.resume(going_on)
    starts = []
    left = []
    for asked, reading in self._with_line:
      while asked.samples and self._free_slots and not reading.num_left:
        sample, slot = asked.samples.popleft(), heapq.heappop(self._free_slots)
        self._running[slot] = _Running(asked.request, sample)
        starts.append(segments.Start(asked.request, sample, reading.line, slot))
      if asked.samples:
        left.append((asked, reading))
      else:
        heapq.heappush(self._free_lines, reading.line)
    self._with_line = left
    self._runner.start(starts)
    return bool(resumed or starts)

  # After a segment.

  def _harvest(self, slots: segments.Slots) -> list[int]:
    """Takes what is finished out of the slots; returns new tokens of each."""
    lengths, cut = [], []
    for slot, one in self._in_slots():
      before, one.num_new = one.num_new, int(slots.num_new[slot])
      lengths.append(one.num_new - before)
      if one.num_new > before and one.newest != self._version:
        one.num_versions, one.newest = one.num_versions + 1, self._version
      reason = slots.reason(slot)
      strings = one.request.stop_strings
      found = None
      if strings:
        found = stopping.find_stop(
          _completion(slots, slot, one).tokens.tolist(),
          strings,
          self._decode_text,
          first=max(before + 1, one.request.min_new_tokens),
        )
      if found is not None:
        if reason is None:
          cut.append(slot)
        one.num_new, reason = found, types.FinishReason.STOP
      if reason is not None:
        del self._running[slot]
        heapq.heappush(self._free_slots, slot)
        completion = _completion(slots, slot, one)
        self._finish(completion, reason, strings if found else ())
    self._runner.release(cut)
    return lengths

  def _finish(
    self,
    one: segments.Suspended,
    reason: types.FinishReason,
    stop_strings: Sequence[str] = (),
  ) -> None:
    """Notes a finished completion; stop strings are those that ended it."""
    tokens = one.tokens.tolist()
    text = stopping.cut_text(tokens, stop_strings, self._decode_text)
    self._finished.append(segments.finish(one, reason, text))


def _completion(
  slots: segments.Slots, slot: int, one: _Running
) -> segments.Suspended:
  return slots.completion(
    slot, one.request, one.sample_index, num_new=one.num_new
  )


def _running(one: segments.Suspended) -> _Running:
  versions = one.versions.tolist()
  return _Running(
    one.request,
    one.sample_index,
    num_new=len(versions),
    num_versions=len(set(versions)),
    newest=versions[-1],
  )


def _reading(one: segments.Suspended, slot: int) -> prefilling.Reading:
  return prefilling.Reading(segments.sequence(one)[:-1], slot)
