"""From the config to a model, its tokenizer, problems and their requests."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import ml_collections

from llamarl_jax import types
from llamarl_jax.checkpoints import gguf
from llamarl_jax.data import chat
from llamarl_jax.data import sources
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import policy
from llamarl_jax.models import config as config_lib

# Prompts checked for their length before a run, of sources that do not end.
_NUM_CHECKED = 256


@dataclasses.dataclass(frozen=True)
class Model:
  """A policy, the tokenizer that goes with it, and its chat template.

  Attributes:
    source: sizes and origin of the parameters.
    tokenizer: text to ids and back.
    chat_template: jinja text; empty where the model has none.
  """

  source: policy.PolicySource
  tokenizer: tokenizers.Tokenizer
  chat_template: str


@dataclasses.dataclass(frozen=True)
class Task:
  """Problems as requests and as supervised examples.

  Attributes:
    source: of problems.
    tokenizer: of the policy.
    group_size: completions a training problem (G).
    temperature: of training completions.
    max_new_tokens: of any completion.
  """

  source: sources.ProblemSource
  tokenizer: tokenizers.Tokenizer
  group_size: int
  temperature: float
  max_new_tokens: int

  def training_request(self, index: int) -> types.Request:
    """Returns the training request of an admission index."""
    return self.request(
      types.Stream.TRAIN,
      index,
      num_samples=self.group_size,
      temperature=self.temperature,
    )

  def request(
    self,
    stream: types.Stream,
    index: int,
    *,
    num_samples: int,
    temperature: float,
  ) -> types.Request:
    """Returns the request of problem `index` of a stream's split."""
    split = 'train' if stream == types.Stream.TRAIN else 'held_out'
    problem = self.source.problem(split, index)
    return types.Request(
      admission_index=index,
      stream=stream,
      problem=problem,
      prompt_tokens=tuple(self.tokenizer.encode(problem.prompt)),
      num_samples=num_samples,
      temperature=temperature,
      max_new_tokens=self.max_new_tokens,
    )

  def evaluation_requests(
    self, count: int, *, num_samples: int = 1, temperature: float = 0.0
  ) -> list[types.Request]:
    """Returns requests of the first held-out problems, greedy by default."""
    return [
      self.request(
        types.Stream.EVALUATION,
        index,
        num_samples=num_samples,
        temperature=temperature,
      )
      for index in range(count)
    ]

  def examples(
    self, first: int, count: int
  ) -> list[tuple[Sequence[int], Sequence[int]]]:
    """Returns (prompt tokens, answer tokens with stop) to learn from.

    Args:
      first: counted from the end of the training stream, so that supervised
        steps and RL do not begin with the same problems.
      count: examples.
    """
    rows = []
    for index in range(first, first + count):
      problem = self.source.problem('train', _SUPERVISED_OFFSET + index)
      answer = self.tokenizer.encode(problem.answer)
      rows.append(
        (
          self.tokenizer.encode(problem.prompt),
          [*answer, self.tokenizer.eos_id],
        )
      )
    return rows


# Supervised examples are drawn from here on in the training stream: RL of any
# length a run can have does not come so far.
_SUPERVISED_OFFSET = 1 << 40


def load_model(config: ml_collections.ConfigDict) -> Model:
  """Returns the model of a config; parameters are not read.

  Raises:
    ValueError: the file is of an unknown kind, or sizes are impossible.
    FileNotFoundError: the file is missing; says how to get it.
  """
  return _MODELS[config.model.source](config)
