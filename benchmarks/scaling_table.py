"""The paper's step-time and weight-sync tables, beside what theory predicts.

  python -m benchmarks.scaling_table [--json=FILE] [--nodetails]

No accelerator is used and nothing is measured: predicted figures stand in
columns of their own, and every figure of the paper carries its mark. Takes
about a minute on one core.
"""

from collections.abc import Sequence
import json
import pathlib
from typing import Any

from absl import app
from absl import flags

from benchmarks import scaling_model as model
from llamarl_jax.models import catalog
from llamarl_jax.models import config as config_lib
from llamarl_jax.theory import schedule

_JSON = flags.DEFINE_string('json', None, 'File to write the results to.')
_DETAILS = flags.DEFINE_bool(
  'details', True, 'Also the ladder, sensitivity and other choices.'
)

_HEADER = """Predicted from a cost model (llamarl_jax/theory), not measured.
Marks: [P] the paper's words, [S] reported by its readers, [U] recollection,
[C] our choice, [D] derived from these. Wu et al. (2025), arXiv 2505.24034."""


def step_rows(prediction: model.Prediction) -> list[dict[str, Any]]:
  """Returns the step-time table, errors relative to the paper."""
  rows = []
  for row, slow, fast, speedup in zip(
    model.ROWS,
    prediction.baseline,
    prediction.llamarl,
    prediction.speedups(),
    strict=True,
  ):
    rows.append(
      {
        'model': row.name,
        'devices': str(row.num_devices),
        'paper_sync': str(row.baseline),
        'predicted_sync': slow.step_seconds,
        'sync_error': _error(slow.step_seconds, row.baseline),
        'paper_async': str(row.llamarl),
        'predicted_async': fast.step_seconds,
        'async_error': _error(fast.step_seconds, row.llamarl),
        'paper_speedup': str(row.speedup),
        'predicted_speedup': speedup,
        'speedup_error': _error(speedup, row.speedup),
      }
    )
  return rows


def use_rows(prediction: model.Prediction) -> list[dict[str, Any]]:
  """Returns the device time of an asynchronous step by size of the model.

  In the paper it more than doubles from 70B to 405B; at a constant efficiency
  it cannot, whatever the lengths are.
  """
  rows = []
  for row, plan in zip(model.ROWS, prediction.llamarl, strict=True):
    parameters = config_lib.num_parameters(catalog.find(row.architecture))
    scale = (row.num_devices.value or 0.0) / (parameters / 1e9)
    rows.append(
      {
        'model': row.name,
        'paper_[D]': scale * (row.llamarl.value or 0.0),
        'predicted': scale * plan.step_seconds,
      }
    )
  return rows


def sync_rows() -> list[dict[str, Any]]:
  """Returns the weight-sync table, errors relative to the paper."""
  rows = []
  for row, (gathered, direct) in zip(
    model.ROWS, model.weight_sync(), strict=True
  ):
    rows.append(
      {
        'model': row.name,
        'paper_openrlhf': str(row.gathered_sync),
        'predicted_gathered': gathered,
        'gathered_error': _error(gathered, row.gathered_sync),
        'paper_llamarl': str(row.direct_sync),
        'predicted_direct': direct,
        'direct_error': _error(direct, row.direct_sync),
      }
    )
  return rows


def plan_rows(prediction: model.Prediction) -> list[dict[str, Any]]:
  """Returns the configurations behind the step-time table."""
  rows = []
  for side, plans in (
    ('sync', prediction.baseline),
    ('async', prediction.llamarl),
  ):
    for row, plan in zip(model.ROWS, plans, strict=True):
      rows.append({'model': row.name, 'side': side, **_plan(plan)})
  return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
  """Returns rows of one shape as text, columns aligned."""
  cells = [[key.replace('_', ' ') for key in rows[0]]]
  for row in rows:
    cells.append([_cell(key, value) for key, value in row.items()])
  widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
  return '\n'.join(
    '  '.join(
      text.ljust(width) if i == 0 else text.rjust(width)
      for i, (text, width) in enumerate(zip(line, widths, strict=True))
    ).rstrip()
    for line in cells
  )


def ladder_rows(prediction: model.Prediction) -> list[dict[str, Any]]:
  """Returns what each ingredient adds at 405B, one at a time."""
  rungs = model.ladder(prediction, model.ROWS[-1])
  first = before = rungs[0][1]
  rows = []
  for name, seconds in rungs:
    rows.append(
      {
        'added': name,
        'step_seconds': seconds,
        'factor': before / seconds,
        'speedup_so_far': first / seconds,
      }
    )
    before = seconds
  return rows


def sensitivity_rows(prediction: model.Prediction) -> list[dict[str, Any]]:
  """Returns the 405B speed-up with one assumption changed at a time."""
  return [
    {
      'changed': name,
      'predicted_sync': slow,
      'predicted_async': fast,
      'speedup': slow / fast,
    }
    for name, slow, fast in model.variations(prediction, model.ROWS[-1])
  ]


def choice_rows() -> list[dict[str, Any]]:
  """Returns predictions under other choices, each fitted anew on 8B."""
  choices = [(workload, model.FACTOR) for workload in model.WORKLOADS]
  choices += [
    (model.WORKLOAD, factor)
    for factor in model.FACTORS
    if factor != model.FACTOR
  ]
  rows = []
  for workload, factor in choices:
    found = model.predict(workload, factor)
    row: dict[str, Any] = {'choice': f'{workload}; fitted: {factor}'}
    for index in (1, 2):
      name = model.ROWS[index].name
      for side, plans, paper in (
        ('sync', found and found.baseline, model.ROWS[index].baseline),
        ('async', found and found.llamarl, model.ROWS[index].llamarl),
      ):
        row[f'{name}_{side}_error'] = (
          _error(plans[index].step_seconds, paper) if plans else None
        )
      row[f'{name}_speedup'] = found.speedups()[index] if found else None
    rows.append(row)
  return rows


def main(argv: Sequence[str]) -> None:
  """Prints the tables."""
  if len(argv) > 1:
    raise app.UsageError(f'unknown arguments {argv[1:]}')
  prediction = model.predict()
  if prediction is None:
    raise app.UsageError(f'no {model.FACTOR} factor fits the 8B row')
  results: dict[str, Any] = {
    'step_time': step_rows(prediction),
    'device_time': use_rows(prediction),
    'weight_sync': sync_rows(),
    'plans': plan_rows(prediction),
  }
  print(_HEADER)
  print(
    f'Batch {model.BATCH_SIZE} on {model.DEVICE} 80 GB [U];'
    f' {prediction.workload} [C].'
  )
  print(
    f'Fitted on the 8B row: the rate of kernel starts, x'
    f' {prediction.baseline_factor:.3f} (sync) and x'
    f' {prediction.llamarl_factor:.3f} (async) of the stated one.'
  )
  print(f'\nStep time, seconds\n{table(results["step_time"])}')
  print(
    '\nDevice seconds of an asynchronous step, a billion parameters\n'
    + table(results['device_time'])
  )
  print(f'\nWeight publication, seconds\n{table(results["weight_sync"])}')
  print(f'\nConfigurations found\n{table(results["plans"])}')
  if _DETAILS.value:
    results['ladder'] = ladder_rows(prediction)
    print(f'\n405B, one ingredient at a time\n{table(results["ladder"])}')
    results['sensitivity'] = sensitivity_rows(prediction)
    print(f'\n405B, assumptions\n{table(results["sensitivity"])}')
    results['choices'] = choice_rows()
    print(f'\nOther choices, each fitted anew\n{table(results["choices"])}')
  if _JSON.value:
    pathlib.Path(_JSON.value).write_text(json.dumps(results, indent=2) + '\n')


def _error(predicted: float, paper: model.Figure) -> float | None:
  if paper.value is None:
    return None
  return predicted / paper.value - 1.0


def _plan(plan: schedule.Plan) -> dict[str, Any]:
  trainer, generator = plan.trainer, plan.generator
  return {
    'trainer': f'{trainer.num_devices} = {trainer.data} x {trainer.fsdp} x'
    f' {trainer.tensor}',
    'micro_batch': str(trainer.micro_batch),
    'remat': trainer.remat,
    'train_s': plan.train_seconds,
    'generator': f'{generator.num_devices} = {generator.replicas} x'
    f' {generator.tensor}',
    'slots': str(generator.slots),
    'weights': generator.weight_dtype,
    'generate_s': plan.generate_seconds,
    'publish_s': plan.publish_seconds,
  }


def _cell(key: str, value: Any) -> str:
  if value is None:
    return '-'
  if isinstance(value, str):
    return value
  if key.endswith('error'):
    return f'{value:+.0%}'
  return f'{value:.2f}'


if __name__ == '__main__':
  app.run(main)
