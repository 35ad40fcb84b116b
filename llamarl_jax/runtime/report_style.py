"""The look of the report's figures, and their way into the page as SVG.

Figures are built without pyplot, which would keep global state in the process
of the controller. Colors are those of Okabe and Ito (2008), told apart with
any color vision: https://jfly.uni-koeln.de/color/
"""

from collections.abc import Sequence
import io
import math
from typing import Any

from llamarl_jax.runtime import strict_json

BLUE = '#0072B2'
ORANGE = '#E69F00'
GREEN = '#009E73'
VERMILION = '#D55E00'
PURPLE = '#CC79A7'
SKY = '#56B4E9'
BLACK = '#222222'
GRAY = '#8A8A8A'
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)

# Width of a figure in inches; the page scales it to its column.
WIDTH = 10.0

_SETTINGS: Any = {
  # Names of executors and reward parts are shown as they are, with any '$'.
  'text.parse_math': False,
  # Text stays text: smaller, searchable, in a font of the reader's system.
  'svg.fonttype': 'none',
  'font.size': 9.5,
  'axes.titlesize': 10.5,
  'axes.titleweight': 'bold',
  'axes.titlelocation': 'left',
  'axes.labelsize': 9.5,
  'axes.labelcolor': BLACK,
  'axes.edgecolor': GRAY,
  'axes.linewidth': 0.8,
  'axes.spines.top': False,
  'axes.spines.right': False,
  'axes.grid': True,
  'axes.axisbelow': True,
  'grid.color': '#E4E4E4',
  'grid.linewidth': 0.7,
  'xtick.color': BLACK,
  'ytick.color': BLACK,
  'xtick.labelsize': 9,
  'ytick.labelsize': 9,
  'legend.fontsize': 8.5,
  'legend.frameon': False,
  'legend.handlelength': 1.6,
  'lines.linewidth': 1.6,
  'lines.solid_capstyle': 'round',
}

# Below this number of steps a line is drawn with its points; from it on, as
# its running mean over the raw values.
_NUM_SMOOTHED = 30


def settings(name: str) -> Any:
  """Returns a context in which figures have the report's look.

  Args:
    name: of the figure; salts the ids within its SVG, so that figures of one
      page keep apart, and two runs of a report give the same bytes.
  """
  # Imported late, as everywhere here: no run should wait for it to start.
  import matplotlib

  return matplotlib.rc_context({**_SETTINGS, 'svg.hashsalt': name})


def new_figure(height: float) -> Any:
  """Returns an empty figure of the report's width.

  Args:
    height: in inches.
  """
  from matplotlib import figure

  return figure.Figure(figsize=(WIDTH, height), layout='constrained')


def to_svg(figure: Any) -> str:
  """Returns the figure as an SVG element to stand within HTML."""
  from matplotlib.backends import backend_svg

  backend_svg.FigureCanvasSVG(figure)
  buffer = io.StringIO()
  # Without the date, so that equal runs give equal reports.
  figure.savefig(
    buffer,
    format='svg',
    metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')),
  )
  text = buffer.getvalue()
  # XML and document type declarations belong to files, not to elements.
  return text[text.index('<svg') :]


def points(
  records: Sequence[dict[str, Any]], key: str
) -> tuple[list[float], list[float]]:
  """Returns (steps, values) of a metric, where it is a finite number.

  Args:
    records: of metrics.jsonl.
    key: of the metric.
  """
  steps, values = [], []
  for record in records:
    value = strict_json.number(record.get(key))
    if value is not None and math.isfinite(value):
      steps.append(float(record['step']))
      values.append(value)
  return steps, values


def running_mean(values: Sequence[float], window: int) -> list[float]:
  """Returns the centered running mean, over fewer values at the ends.

  Args:
    values: one a step.
    window: number of values averaged over, odd.
  """
  half = window // 2
  result = []
  for index in range(len(values)):
    near = values[max(0, index - half) : index + half + 1]
    result.append(sum(near) / len(near))
  return result


def draw_line(
  axes: Any,
  records: Sequence[dict[str, Any]],
  key: str,
  label: str,
  color: str,
  *,
  scale: float = 1.0,
) -> bool:
  """Draws a metric against the step; tells whether there was any of it.

  Args:
    axes: to draw on.
    records: of metrics.jsonl.
    key: of the metric.
    label: for the legend.
    color: of the line.
    scale: factor on the values, such as 100 for percent.
  """
  steps, values = points(records, key)
  if not steps:
    return False
  values = [value * scale for value in values]
  if len(values) < _NUM_SMOOTHED:
    axes.plot(steps, values, '.-', color=color, label=label, markersize=4)
    return True
  window = 2 * (len(values) // 20) + 1
  axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.9)
  axes.plot(steps, running_mean(values, window), color=color, label=label)
  return True


def finish(
  axes: Any,
  title: str,
  x_label: str,
  y_label: str,
  *,
  has_data: bool = True,
  floor: float | None = None,
  legend: bool = True,
) -> None:
  """Gives a panel its title, labels, limits and legend.

  Args:
    axes: of the panel.
    title: of the panel.
    x_label: with its unit.
    y_label: with its unit.
    has_data: False says so in the middle of an empty panel.
    floor: lowest value that the data may take, or None.
    legend: whether lines are told apart by one.
  """
  axes.set_title(title)
  axes.set_xlabel(x_label)
  axes.set_ylabel(y_label)
  if not has_data:
    axes.text(
      0.5,
      0.5,
      'no data',
      transform=axes.transAxes,
      ha='center',
      va='center',
      color=GRAY,
    )
    axes.set_xticks([])
    axes.set_yticks([])
    return
  if floor is not None:
    # Zero is a fact for a share or a count: the axis starts there, with the
    # data's share of room above it, or a line near the top would be cut.
    highest = max(axes.dataLim.y1, floor)
    axes.set_ylim(floor, highest + (0.12 * (highest - floor) or 1.0))
  if x_label == 'train step':
    axes.xaxis.get_major_locator().set_params(integer=True)
  if legend and axes.get_legend_handles_labels()[0]:
    axes.legend(loc='best')
