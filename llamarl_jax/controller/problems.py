"""From the config to a model, its tokenizer, problems and their requests."""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import pathlib
from typing import Any

import ml_collections

from llamarl_jax import types
from llamarl_jax.checkpoints import gguf
from llamarl_jax.checkpoints import hf
from llamarl_jax.checkpoints import hf_config
from llamarl_jax.controller import checks
from llamarl_jax.data import chat
from llamarl_jax.data import folder_tokenizer
from llamarl_jax.data import reasoning_gym
from llamarl_jax.data import sources
from llamarl_jax.data import tokenizers
from llamarl_jax.executors import policy
from llamarl_jax.models import config as config_lib
from llamarl_jax.rewards import catalog
from llamarl_jax.rewards import combine

# Prompts checked for their length before a run, of sources that do not end.
_NUM_CHECKED = 256


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
  """The chat template of a model file.

  Attributes:
    text: jinja; empty where the file has none.
    bos_token: text of the token that begins a sequence, or ''.
    eos_token: text of the token that ends a completion.
  """

  text: str
  bos_token: str
  eos_token: str


_NO_CHAT = ChatTemplate('', '', '')


@dataclasses.dataclass(frozen=True)
class Model:
  """A policy, the tokenizer that goes with it, and its chat template.

  Attributes:
    source: sizes and origin of the parameters.
    tokenizer: text to ids and back.
    chat_template: of the file.
  """

  source: policy.PolicySource
  tokenizer: tokenizers.Tokenizer
  chat_template: ChatTemplate


@dataclasses.dataclass(frozen=True)
class Task:
  """Problems as requests and as supervised examples.

  Attributes:
    source: of problems.
    tokenizer: of the policy.
    group_size: completions a training problem (G).
    temperature: of training completions.
    max_new_tokens: of any completion.
    stop_strings: of any completion.
    evaluation: further fields of requests of the evaluation stream.
  """

  source: sources.ProblemSource
  tokenizer: tokenizers.Tokenizer
  group_size: int
  temperature: float
  max_new_tokens: int
  stop_strings: tuple[str, ...] = ()
  evaluation: Mapping[str, Any] = dataclasses.field(default_factory=dict)

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
      prompt_tokens=tuple(
        tokenizers.encode_prompt(self.tokenizer, problem.prompt)
      ),
      num_samples=num_samples,
      temperature=temperature,
      max_new_tokens=self.max_new_tokens,
      stop_strings=self.stop_strings,
      **(self.evaluation if stream == types.Stream.EVALUATION else {}),
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
    rows: list[tuple[Sequence[int], Sequence[int]]] = []
    for index in range(first, first + count):
      problem = self.source.problem('train', _SUPERVISED_OFFSET + index)
      answer = self.tokenizer.encode(problem.answer)
      rows.append(
        (
          tokenizers.encode_prompt(self.tokenizer, problem.prompt),
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


def _scratch_model(config: ml_collections.ConfigDict) -> Model:
  c = config.model
  if config.prompt.chat:
    raise ValueError(
      'prompt.chat=True needs the chat template of a model file, and'
      " model.source='scratch' has none; set prompt.chat=False"
    )
  tokenizer = tokenizers.CharacterTokenizer()
  model = config_lib.LlamaConfig(
    vocab_size=tokenizer.vocab_size,
    width=c.width,
    num_layers=c.num_layers,
    num_heads=c.num_heads,
    num_kv_heads=c.num_kv_heads,
    head_dim=c.head_dim,
    mlp_width=c.mlp_width,
    rope_theta=c.rope_theta,
    norm_epsilon=c.norm_epsilon,
    tie_embeddings=c.tie_embeddings,
    max_position=checks.longest_sequence(config),
  )
  source = policy.PolicySource(model, 'scratch', '', config.seed)
  return Model(source, tokenizer, _NO_CHAT)


def _gguf_model(config: ml_collections.ConfigDict) -> Model:
  path = config.model.path
  if path == 'smollm2':
    path = gguf.find_smollm2()
  file = gguf.read_model_file(path)
  tokenizer = tokenizers.BytePairTokenizer(**dataclasses.asdict(file.tokenizer))
  source = policy.PolicySource(file.config, 'gguf', path, config.seed)
  chat_template = ChatTemplate(
    file.chat_template, file.bos_token, file.eos_token
  )
  _check_positions(config, source)
  return Model(source, tokenizer, chat_template)


def _hf_model(config: ml_collections.ConfigDict) -> Model:
  """Returns the model of a folder, all of its files checked."""
  if not config.model.path:
    raise ValueError(
      "model.path='' names no model: give the folder of a Hugging Face model,"
      ' with config.json, *.safetensors and tokenizer'
    )
  # Absolute: executors may run in another working directory.
  folder = pathlib.Path(config.model.path).expanduser().absolute()
  network = hf_config.read_config(folder)
  # Headers only: a missing file shows before anything is allocated.
  hf.check_tensors(folder, network)
  tokenizer = folder_tokenizer.load(
    folder, config.model.tokenizer, chat=config.prompt.chat
  )
  network = dataclasses.replace(
    network,
    num_tokens=folder_tokenizer.num_tokens(tokenizer, network.vocab_size),
  )
  source = policy.PolicySource(network, 'hf', str(folder), config.seed)
  _check_positions(config, source)
  chat_template = ChatTemplate(
    tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token
  )
  return Model(source, tokenizer, chat_template)


def _check_positions(
  config: ml_collections.ConfigDict, source: policy.PolicySource
) -> None:
  longest = checks.longest_sequence(config)
  if longest > source.model.max_position:
    raise ValueError(
      'generator.max_prompt_length + generator.max_new_tokens ='
      f' {longest} exceeds the {source.model.max_position} positions of'
      f' {source.path}; lower one of them'
    )


_MODELS: Mapping[str, Callable[[ml_collections.ConfigDict], Model]] = {
  'gguf': _gguf_model,
  'hf': _hf_model,
  'scratch': _scratch_model,
}


def make_task(config: ml_collections.ConfigDict, model: Model) -> Task:
  """Returns the problems of a config as requests of a model.

  Prompts are checked to fit: all those of a source that ends, else the first
  few hundred.

  Raises:
    ValueError: a problem, a template or a prompt's length is at fault.
    FileNotFoundError: the problem file is missing.
  """
  name = config.problems.source
  if name not in sources.SOURCES:
    raise ValueError(
      f'problems.source={name!r} must be one of {sorted(sources.SOURCES)}'
    )
  source = sources.SOURCES[name](
    config.seed,
    prompt_format=_prompt_format(config, model.chat_template),
    **_OPTIONS[name](config.problems),
  )
  task = Task(
    source=source,
    tokenizer=model.tokenizer,
    group_size=config.group_size,
    temperature=config.generator.temperature,
    max_new_tokens=config.generator.max_new_tokens,
    stop_strings=tuple(config.generator.stop_strings),
    evaluation={
      field: config.evaluation[field]
      for field in ('top_k', 'top_p', 'min_p', 'min_new_tokens')
    },
  )
  available = source.num_problems('held_out')
  wanted = config.evaluation.num_problems
  if available is not None and available < wanted:
    raise ValueError(
      f'evaluation.num_problems={wanted}, but there are {available} held-out'
      ' problems; ask for fewer, or hold out more'
    )
  _check_prompts(task, config)
  return task


def _check_prompts(task: Task, config: ml_collections.ConfigDict) -> None:
  limit = config.generator.max_prompt_length
  total = task.source.num_problems('train') or _NUM_CHECKED
  for index in range(total):
    request = task.training_request(index)
    length = len(request.prompt_tokens)
    if not 1 <= length <= limit:
      raise ValueError(
        f'training problem {index} has a prompt of {length} tokens'
        f' ({request.problem.prompt[:40]!r}...), and generator.'
        f'max_prompt_length={limit}; raise it or shorten the prompt'
      )
  task.evaluation_requests(1)


def _prompt_format(
  config: ml_collections.ConfigDict, template: ChatTemplate
) -> chat.PromptFormat:
  c = config.prompt
  if not c.chat:
    if c.system or c.prefill or c.default_system:
      raise ValueError(
        f'prompt.system={c.system!r}, prompt.default_system={c.default_system}'
        f' and prompt.prefill={c.prefill!r} belong to a chat; set'
        ' prompt.chat=True or put all into prompt.user'
      )
    return chat.PlainPrompt(c.user)
  if not template.text:
    raise ValueError(
      f'prompt.chat=True, but the model in {config.model.path} has no chat'
      ' template; set prompt.chat=False, or put one into chat_template.jinja'
    )
  return chat.ChatPrompt(
    template.text,
    user=c.user,
    prefill=c.prefill,
    system=c.system or None,
    default_system=c.default_system,
    bos_token=template.bos_token,
    eos_token=template.eos_token,
  )


def _arithmetic_options(c: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    'operators': tuple(c.operators),
    'num_operands': c.num_operands,
    'min_value': c.min_value,
    'max_value': c.max_value,
    'uniform_digits': c.uniform_digits,
    'non_negative': c.non_negative,
    'question_format': 'spaced' if c.spaced else 'compact',
    'held_out_fraction': c.held_out_fraction,
  }


def _jsonl_options(c: ml_collections.ConfigDict) -> dict[str, Any]:
  return {
    'path': c.path,
    'held_out_path': c.held_out_path,
    'held_out_fraction': c.held_out_fraction,
    'question_field': c.question_field,
    'answer_field': c.answer_field,
    'answer_pattern': c.answer_pattern,
  }


def _reasoning_gym_options(c: ml_collections.ConfigDict) -> dict[str, Any]:
  return {'dataset': c.dataset, 'held_out_fraction': c.held_out_fraction}


_OPTIONS: Mapping[
  str, Callable[[ml_collections.ConfigDict], dict[str, Any]]
] = {
  'arithmetic': _arithmetic_options,
  'jsonl': _jsonl_options,
  'reasoning_gym': _reasoning_gym_options,
}


def reward_arguments(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """Returns the arguments of the reward executor.

  Raises:
    ValueError: there is no such scorer.
  """
  c = config.reward
  imports: tuple[str, ...] = ('math_verify',)
  if c.scorer == 'reasoning_gym':
    # Not in the catalog: rewards know no problem sources.
    scorer: types.RewardFn = reasoning_gym.score_reasoning_gym
    imports = ('llamarl_jax.data.reasoning_gym',)
  else:
    scorer = catalog.make_reward(c.scorer)
  hostile = c.scorer in {'reasoning_gym', *catalog.NEEDS_TIME_LIMIT}
  return {
    'reward_fn': combine.WeightedSum((scorer,), {'correct': 1.0}),
    'num_workers': c.num_workers if hostile else 0,
    'time_limit_seconds': c.timeout_seconds,
    'worker_imports': imports,
  }
