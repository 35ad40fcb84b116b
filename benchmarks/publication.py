"""Measures what weight publications cost a generator that goes on decoding.

  python -m benchmarks.publication [--model=smollm2-135m] [--publications=10]
      [--requests=128] [--new_tokens=256] [--transport=transfer]
      [--quantization=] [--rounds=3] [--json=FILE]

One generator answers the same requests with and without publications, in
turns. Weights come from another process, which pins, digests and sends them as
a trainer does, on the same cores; the generator fetches while it decodes and
flips between two segments.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import json
import multiprocessing
from multiprocessing import connection
import pathlib
import statistics
import time
from typing import Any

from absl import app
from absl import flags
import jax

from benchmarks import generation_engine
from benchmarks import generation_workload as workload_lib
from benchmarks import train_steps
from benchmarks import workload as shapes_lib
from llamarl_jax import types
from llamarl_jax.channels import registry
from llamarl_jax.channels import weights
from llamarl_jax.executors import generator as generator_lib
from llamarl_jax.models import quantization
from llamarl_jax.runtime import host_memory

_SLOTS = 32
_PROMPT = 32


@dataclasses.dataclass(frozen=True)
class _NoText:
  """Stands in for a tokenizer: nothing stops a completion or reads it."""

  vocab_size: int
  bos_id: int | None = None
  adds_bos: bool = False
  eos_id: int = 0
  pad_id: int = 0
  stop_ids: tuple[int, ...] = ()

  def encode(self, text: str) -> list[int]:
    """Returns no tokens."""
    del text
    return []

  def decode(self, ids: Sequence[int]) -> str:
    """Returns no text."""
    del ids
    return ''


def publish(
  commands: connection.Connection, model: str, transport: str, kind: str
) -> None:
  """Runs the trainer's end: publishes the version of each command, and offers.

  Args:
    commands: gives (version, destination); takes manifest and seconds. Ends
      when the other end is closed.
    model: key of `workload.WORKLOADS`.
    transport: name of it.
    kind: of quantization.
  """
  host_memory.keep_freed_memory()
  publisher = registry.TRANSPORTS[transport].publisher(
    weights.TransportSettings()
  )
  params = train_steps.load_params(shapes_lib.WORKLOADS[model])
  params = quantization.quantize(params, kind)
  commands.send('ready')
  try:
    while True:
      version, destination = commands.recv()
      report = publisher.publish(types.VersionedParams(version, params))
      commands.send((publisher.offer(destination), report.seconds))
  except EOFError:
    publisher.close()


@dataclasses.dataclass
class Publications:
  """Orders weights at given tokens and hands them to the generator.

  Attributes:
    commands: to the publishing process.
    generator: takes the weights.
    version: newest ordered.
    seconds: of each publication, by part.
  """

  commands: connection.Connection
  generator: generator_lib.GeneratorExecutor
  version: types.Version
  seconds: list[dict[str, float]] = dataclasses.field(default_factory=list)
  _is_ordered: bool = False
  _is_fetched: bool = False

  @property
  def is_idle(self) -> bool:
    """Whether none is under way."""
    return not (self._is_ordered or self._is_fetched)

  def order(self) -> None:
    """Asks for the next version; returns at once."""
    self.version = self.version._replace(batches=self.version.batches + 1)
    self.commands.send((self.version, self.generator.destination()))
    self._is_ordered = True

  def poll(self) -> None:
    """Begins the fetch if the publication is offered; returns at once."""
    if self._is_ordered and self.commands.poll():
      manifest, seconds = self.commands.recv()
      self.seconds.append({'publish': seconds})
      self.generator.begin_fetch(manifest)
      self._is_ordered, self._is_fetched = False, True

  def note(self, report: types.StepReport) -> types.Version | None:
    """Returns what to commit, if a fetch arrived in the step reported.

    Raises:
      RuntimeError: the fetch failed.
    """
    if report.fetch_failed:
      raise RuntimeError(f'the fetch of {self.version} failed')
    if report.fetched is None or not self._is_fetched:
      return None
    self._is_fetched = False
    self.seconds[-1]['fetch'] = report.metrics['fetch_seconds']
    self.seconds[-1]['bytes'] = report.metrics['fetch_bytes']
    return report.fetched


def run(
  generator: generator_lib.GeneratorExecutor,
  asked: Sequence[types.Request],
  publications: Publications,
  count: int,
) -> tuple[float, int]:
  """Answers requests while `count` publications come, evenly spread.

  Args:
    generator: idle, with weights.
    asked: the requests.
    publications: where they come from.
    count: how many, 0 for none.

  Returns:
    Seconds, and the publications that were taken up.
  """
  total = sum(r.max_new_tokens * r.num_samples for r in asked)
  made = ordered = committed = 0
  commit = None
  inputs: Sequence[types.Request] = asked
  start = time.perf_counter()
  while True:
    due = ordered < count and made * (count + 1) >= total * (ordered + 1)
    if due and publications.is_idle:
      publications.order()
      ordered += 1
    publications.poll()
    report = generator.step(inputs, commit)
    inputs = ()
    committed += commit is not None
    commit = publications.note(report)
    for span in report.spans:
      made += span.details.get('tokens', 0)
    if not report.unfinished:
      break
  seconds = time.perf_counter() - start
  _drain(generator, publications, commit)
  return seconds, committed


def _drain(
  generator: generator_lib.GeneratorExecutor,
  publications: Publications,
  commit: types.Version | None,
) -> None:
  """Waits for what came too late, so that the next run begins without it."""
  while commit is not None or not publications.is_idle:
    publications.poll()
    commit = publications.note(generator.step((), commit))


def make_generator(
  model: str, requests: int, new_tokens: int, transport: str, kind: str
) -> tuple[generator_lib.GeneratorExecutor, list[types.Request]]:
  """Returns a generator with all of its programs compiled, and requests."""
  workload = workload_lib.GenerationWorkload(
    model, min(_SLOTS, requests), _PROMPT, (new_tokens,) * requests
  )
  settings = generator_lib.GeneratorSettings(
    model=train_steps.llama_config(workload.shape),
    mesh={'tensor': 1},
    tokenizer=_NoText(workload.shape.vocab_size),
    seed=0,
    num_slots=workload.slots,
    segment_length=generation_engine.SEGMENT_LENGTH,
    max_prompt_length=workload.prompt,
    max_new_tokens=workload.max_new,
    quantization=kind,
    warm_up=True,
  )
  generator = generator_lib.GeneratorExecutor(
    devices=jax.devices()[:1],
    name='generator',
    settings=settings,
    transport=transport,
  )
  generator.adopt(generation_engine.load_policy(workload))
  asked = generation_engine.requests(
    workload_lib.prompts(workload), workload.lengths, 1.0
  )
  return generator, asked


def measure(
  generator: generator_lib.GeneratorExecutor,
  asked: Sequence[types.Request],
  publications: Publications,
  count: int,
  rounds: int,
) -> dict[str, Any]:
  """Returns the seconds of runs with and without publications, in turns.

  Raises:
    ValueError: fewer than `count` were taken up before a run ended.
  """
  warm_up = [dataclasses.replace(r, max_new_tokens=1) for r in asked[:1]]
  run(generator, warm_up, publications, 0)
  publications.order()
  _drain(generator, publications, None)
  publications.seconds.clear()
  seconds: dict[str, list[float]] = {'without': [], 'with': []}
  for i in range(rounds):
    # The order alternates: who comes second may find the machine warmer.
    for name in ('without', 'with') if i % 2 == 0 else ('with', 'without'):
      wanted = count if name == 'with' else 0
      taken, committed = run(generator, asked, publications, wanted)
      if committed != wanted:
        raise ValueError(
          f'{committed} of {wanted} publications were taken up in'
          f' {taken:.1f} s: ask for fewer, or for more tokens.'
        )
      seconds[name].append(taken)
  costs = [
    with_them / without - 1
    for without, with_them in zip(
      seconds['without'], seconds['with'], strict=True
    )
  ]
  return {
    'seconds': seconds,
    # Tokens a second with publications over those without, less than 1.
    'throughput_lost': [cost / (1 + cost) for cost in costs],
    'publications': publications.seconds,
  }


def table(result: Mapping[str, Any]) -> str:
  """Returns the results for people to read."""
  medians = {k: statistics.median(v) for k, v in result['seconds'].items()}
  lost = result['throughput_lost']
  parts = result['publications']
  means = {k: statistics.mean(p[k] for p in parts) for k in parts[0]}
  return '\n'.join(
    [
      f'{result["model"]}: {result["requests"]} completions of'
      f' {result["new_tokens"]} tokens,'
      f' {result["count"]} publications by {result["transport"]}, jax'
      f' {result["jax"]}',
      f'without {result["num_tokens"] / medians["without"]:.0f} tokens/s, with'
      f' {result["num_tokens"] / medians["with"]:.0f}:'
      f' {100 * statistics.median(lost):.1f} % lost'
      f' ({100 * min(lost):.1f} to {100 * max(lost):.1f})',
      f'a publication: {means["bytes"] / 1e6:.0f} MB, {means["publish"]:.2f} s'
      f' to pin and digest, {means["fetch"]:.2f} s to fetch and verify, while'
      f' decoding goes on',
    ]
  )


def main(arguments: Sequence[str]) -> None:
  """Runs the command."""
  del arguments
  values = flags.FLAGS
  host_memory.keep_freed_memory()
  context = multiprocessing.get_context('spawn')
  commands, theirs = context.Pipe()
  process = context.Process(
    target=publish,
    args=(theirs, values.model, values.transport, values.quantization),
  )
  process.start()
  theirs.close()
  generator, asked = make_generator(
    values.model,
    values.requests,
    values.new_tokens,
    values.transport,
    values.quantization,
  )
  commands.recv()
  publications = Publications(commands, generator, types.Version(0, 0))
  try:
    result = measure(
      generator, asked, publications, values.publications, values.rounds
    )
  finally:
    generator.close()
    commands.close()
    process.join()
  result |= {
    'model': values.model,
    'requests': values.requests,
    'new_tokens': values.new_tokens,
    'num_tokens': values.requests * values.new_tokens,
    'count': values.publications,
    'transport': values.transport,
    'quantization': values.quantization,
    'jax': jax.__version__,
  }
  if values.json:
    pathlib.Path(values.json).write_text(json.dumps(result, indent=1))
  print(table(result))


def _define_flags() -> None:
  models = sorted(shapes_lib.WORKLOADS)
  transports = [k for k, t in registry.TRANSPORTS.items() if t.across_processes]
  flags.DEFINE_enum('model', 'smollm2-135m', models, 'Whose shape.')
  flags.DEFINE_integer('publications', 10, 'Of a run.', lower_bound=1)
  flags.DEFINE_integer('requests', 128, 'Completions of a run.', lower_bound=1)
  flags.DEFINE_integer('new_tokens', 256, 'Of each.', lower_bound=1)
  flags.DEFINE_enum('transport', 'transfer', transports, 'How weights come.')
  flags.DEFINE_enum('quantization', '', ['', 'int8', 'fp8'], 'Of weights sent.')
  flags.DEFINE_integer('rounds', 3, 'Runs of each.', lower_bound=1)
  flags.DEFINE_string('json', None, 'File to write the results to.')


if __name__ == '__main__':
  _define_flags()
  app.run(main)
