"""Cost curves fitted to measurements, in the form the cost model predicts.

A step takes a fixed time and a time for each unit of work: seconds a sample
then fall as 1 / batch. Coefficients are not negative and relative errors are
least, so that short and long measurements count alike.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import itertools

import numpy as np


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One timed piece of work.

  Attributes:
    seconds: it took.
    work: by the name of a unit, how much of it there was: 'tokens',
      'active' slots, 'cached' positions ...
  """

  seconds: float
  work: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Curve:
  """seconds = fixed + sum of rate * work.

  Attributes:
    fixed: seconds of a piece of work, however small.
    rates: seconds a unit, by its name.
    relative_error: root mean square over the measurements it was fitted to.
  """

  fixed: float
  rates: Mapping[str, float]
  relative_error: float = 0.0

  def seconds(self, **work: float) -> float:
    """Returns the seconds of so much work; units not given are 0.

    Raises:
      ValueError: a unit is not one of the curve's.
    """
    unknown = sorted(set(work) - set(self.rates))
    if unknown:
      raise ValueError(
        f'units {unknown} are not of this curve, which has {sorted(self.rates)}'
      )
    return self.fixed + sum(self.rates[name] * work[name] for name in work)


def fit(measurements: Sequence[Measurement]) -> Curve:
  """Returns the curve with least relative errors and no negative rate.

  Args:
    measurements: all with the same units, at least one more than there are
      units.

  Raises:
    ValueError: too few measurements, unequal units, or a time that is not
      positive.
  """
  names = sorted(measurements[0].work) if measurements else []
  if len(measurements) < len(names) + 1:
    raise ValueError(
      f'{len(measurements)} measurements cannot fit {len(names) + 1}'
      ' coefficients; measure more batches'
    )
  for item in measurements:
    if sorted(item.work) != names:
      raise ValueError(
        f'a measurement has units {sorted(item.work)}, another {names}'
      )
    if not item.seconds > 0:
      raise ValueError(f'a measurement took {item.seconds} seconds')
  times = np.array([item.seconds for item in measurements])
  columns = [np.ones(len(times))]
  columns += [np.array([m.work[name] for m in measurements]) for name in names]
  # Divided by the times: residuals become relative errors.
  matrix = np.stack(columns, axis=1) / times[:, None]
  coefficients, error = _nonnegative(matrix, np.ones(len(times)))
  return Curve(
    float(coefficients[0]),
    dict(zip(names, coefficients[1:].tolist(), strict=True)),
    error,
  )


def _nonnegative(
  matrix: np.ndarray, target: np.ndarray
) -> tuple[np.ndarray, float]:
  """Returns the least-squares solution without negative coefficients.

  The few coefficients allow every set of zeros to be tried: the best solution
  that is not negative is the exact one.

  Args:
    matrix: f64[n, c].
    target: f64[n].

  Returns:
    f64[c], and the root mean square of the residual.
  """
  count = matrix.shape[1]
  best, least = np.zeros(count), float(np.sqrt(np.mean(target**2)))
  # Units differ by many orders of magnitude.
  scale = np.maximum(np.linalg.norm(matrix, axis=0), 1e-300)
  for size in range(1, count + 1):
    for chosen in itertools.combinations(range(count), size):
      used = list(chosen)
      found, *_ = np.linalg.lstsq(
        matrix[:, used] / scale[used], target, rcond=None
      )
      residual = matrix[:, used] / scale[used] @ found - target
      error = float(np.sqrt(np.mean(residual**2)))
      if np.all(found >= 0) and error < least:
        least = error
        best = np.zeros(count)
        best[used] = found / scale[used]
  return best, least
