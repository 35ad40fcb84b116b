"""Nouns and protocols of the core.

Shape legend, used in every docstring of the project:

  N  prompts (groups) in a batch          G  completions a prompt
  B  sequences in a batch, N * G          R  rows of a packed batch
  T  tokens a row                         V  vocabulary size
  L  layers                               S  decode slots
  P  prompts in one prefill               C  cache positions a slot
  H  query heads                          K  key/value heads
  D  model width                          A  width of one head
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import enum
from typing import Any
from typing import NamedTuple
from typing import Protocol

import flax.struct
import jax
import numpy as np

# A pytree of arrays: what crosses module borders in place of an nnx module.
Params = Any
Metrics = Mapping[str, 'Mean']


class Mean(NamedTuple):
  """A sum with the count it is to be divided by; combined by adding both."""

  total: jax.Array
  count: jax.Array  # type: ignore[assignment]  # Not the method of tuples.

  def merge(self, other: 'Mean') -> 'Mean':
    """Returns the mean over both samples."""
    return Mean(self.total + other.total, self.count + other.count)

  def value(self) -> jax.Array:
    """Returns total / count, and 0 where the count is 0."""
    count = jax.numpy.asarray(self.count, jax.numpy.float32)
    safe = jax.numpy.where(count > 0, count, 1.0)
    return jax.numpy.where(count > 0, self.total / safe, 0.0)


class Version(NamedTuple):
  """The version of a policy.

  `batches` counts consumed batches and advances with every one of them, also
  where a non-finite update was skipped. `incarnation` counts the lives of the
  trainer: one restored from a checkpoint is a new incarnation. Versions order
  lexicographically.
  """

  incarnation: int
  batches: int


@dataclasses.dataclass(frozen=True)
class VersionedParams:
  """Parameters with the version they are: weights never travel without it."""

  version: Version
  params: Params


@flax.struct.dataclass
class Trajectories:
  """Right-padded rows of prompt and completion tokens, ready to train on.

  A row may hold several packed sequences. `log_probs[:, t]` scores token t in
  every array of log-probs, here and elsewhere.

  Attributes:
    tokens: i32[R, T].
    completion_mask: bool[R, T], True on tokens the generator sampled.
    segment_ids: i32[R, T], 1, 2, ... for the sequences of a row, 0 = padding.
    positions: i32[R, T], restarting at 0 with each sequence.
    behavior_log_probs: f32[R, T], of the policy that sampled the token (mu).
    policy_version: i32[R, T], `Version.batches` of that policy.
    advantages: f32[R, T], 0 outside the completion mask.
    reference_log_probs: f32[R, T] of the reference policy, or None.
    proximal_log_probs: f32[R, T] of the policy at the start of the batch, as
      the trainer recomputes it, or None.
    prefix_ids: i32[R, T], the segment that a token reads beside its own, as
      completions of one group read their prompt; 0 or None for none.
    predecessors: i32[R, T], place in the row of the token before, from which
      this one is predicted; None where that is t - 1.
  """

  tokens: jax.Array
  completion_mask: jax.Array
  segment_ids: jax.Array
  positions: jax.Array
  behavior_log_probs: jax.Array
  policy_version: jax.Array
  advantages: jax.Array
  reference_log_probs: jax.Array | None = None
  proximal_log_probs: jax.Array | None = None
  prefix_ids: jax.Array | None = None
  predecessors: jax.Array | None = None


class LossOutput(NamedTuple):
  """A loss, summed, with its denominator; and metrics in the same form."""

  loss: Mean
  metrics: Metrics


# (log_probs f32[R, T], Trajectories) -> LossOutput
LossFn = Callable[[jax.Array, Trajectories], LossOutput]
# (rewards f32[N, G], valid bool[N, G]) -> f32[N, G]
AdvantageFn = Callable[[jax.Array, jax.Array], jax.Array]


class Stream(enum.IntEnum):
  """Tells apart the random streams of one seed."""

  TRAIN = 0
  EVALUATION = 1


class FinishReason(enum.StrEnum):
  """Why a completion ended."""

  STOP = 'stop'  # The last token is a stop token, or ends a stop string.
  LENGTH = 'length'  # max_new_tokens were sampled.
  BUDGET = 'budget'  # It spanned more policy versions than allowed.


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem to be answered.

  Attributes:
    index: its place in its source, unique within a split.
    prompt: the text the policy continues, chat template applied.
    answer: the expected answer, as text.
    question: the bare question, for people to read.
    metadata: whatever else the scorer of the source needs.
  """

  index: int
  prompt: str
  answer: str
  question: str = ''
  metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Request:
  """A group to be generated: one prompt, `num_samples` completions of it.

  Attributes:
    admission_index: place in the admission order of its stream.
    stream: training or evaluation; part of the address of each random key.
    problem: the problem asked.
    prompt_tokens: token ids of `problem.prompt`, at least one.
    num_samples: completions wanted (G).
    temperature: of the softmax sampled from; 0 is greedy.
    max_new_tokens: limit on the tokens of one completion.
    min_new_tokens: tokens before which no stop token is sampled.
    top_k: sample among so many of the likeliest tokens; 0 = among all.
    top_p: sample among the likeliest tokens that hold so much probability.
    min_p: leave out tokens with less than this times the largest probability.
    stop_strings: texts that end a completion, which is cut before them.
  """

  admission_index: int
  stream: Stream
  problem: Problem
  prompt_tokens: tuple[int, ...]
  num_samples: int
  temperature: float
  max_new_tokens: int
  min_new_tokens: int = 0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  stop_strings: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
  """One finished completion, as host arrays.

  Attributes:
    admission_index: of the request it answers.
    sample_index: its place in the group, 0 .. G - 1.
    tokens: i32[n], n >= 1, the stop token included where one was sampled.
    log_probs: f32[n], behavior log-probs of `tokens`.
    versions: i32[n], `Version.batches` of the policy that sampled each.
    finish_reason: why it ended.
    text: `tokens` decoded, without special tokens, up to a stop string.
  """

  admission_index: int
  sample_index: int
  tokens: np.ndarray
  log_probs: np.ndarray
  versions: np.ndarray
  finish_reason: FinishReason
  text: str


@dataclasses.dataclass(frozen=True)
class Group:
  """A request with its completions, and what was said of them.

  Attributes:
    request: what was asked.
    completions: in sample order, G of them.
    rewards: per completion the named parts of its reward; None before scoring.
      The part 'total' is their weighted sum, what training maximises.
    reference_log_probs: per completion f32[n], or None.
  """

  request: Request
  completions: tuple[Completion, ...]
  rewards: tuple[Mapping[str, float], ...] | None = None
  reference_log_probs: tuple[np.ndarray, ...] | None = None


# (problem, completion text, finish reason) -> named parts of the reward
RewardFn = Callable[[Problem, str, FinishReason], Mapping[str, float]]


@flax.struct.dataclass
class TrainState:
  """Everything an update reads and writes.

  Attributes:
    params: master weights, float32.
    opt_state: of the optax chain.
    batches_consumed: i32[], the version of `params`.
    skipped_steps: i32[], updates not applied because they were not finite.
  """

  params: Params
  opt_state: Any
  batches_consumed: jax.Array
  skipped_steps: jax.Array


class Status(enum.StrEnum):
  """What an executor did in a step; idle bubbles are measured from these."""

  PROGRESSED = 'progressed'
  STARVED = 'starved'  # Nothing to do: no input was there.
  BLOCKED = 'blocked'  # Inputs were there, but may not be used yet.
  FINISHED = 'finished'


@dataclasses.dataclass(frozen=True)
class Span:
  """One named stretch of work on the timeline.

  Attributes:
    name: such as 'segment', 'train_step', 'score', 'publish', 'fetch'.
    start: seconds since the epoch, by the clock of the executor's host.
    stop: likewise.
    details: small facts to show beside it (version, tokens, ...).
  """

  name: str
  start: float
  stop: float
  details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class StepReport:
  """What one step of an executor gave.

  Attributes:
    status: see Status.
    outputs: host records for the next executor.
    metrics: named numbers, or counts by value.
    spans: stretches of work to put on the executor's track of the timeline.
    fetched: newest version verified in the spare buffer, ready to commit.
    unfinished: completions a generator still has to make; None = not said.
    fetch_failed: whether a fetch failed, so that it has to be offered again.
  """

  status: Status
  outputs: Sequence[Any] = ()
  metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  spans: Sequence[Span] = ()
  fetched: Version | None = None
  unfinished: int | None = None
  fetch_failed: bool = False


class Executor(Protocol):
  """A self-contained role: generator, trainer, reward or reference."""

  def step(
    self, inputs: Sequence[Any], commit_version: Version | None
  ) -> StepReport:
    """Does one bounded piece of work.

    Args:
      inputs: host records, as the incoming channel delivers them.
      commit_version: version to flip to before the work, or None to stay.
    """

  def state(self) -> Mapping[str, Any]:
    """Returns what `restore` needs, as host values."""

  def restore(self, state: Mapping[str, Any]) -> None:
    """Continues from `state`."""

  def close(self) -> None:
    """Releases processes, files and sockets; may be called twice."""
