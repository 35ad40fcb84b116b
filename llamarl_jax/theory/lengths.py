"""How long responses get: one distribution for models and simulator.

Log-normal, cut at a limit, as response lengths of reasoning tasks are skewed
to the right; its spread is what holds up a synchronous step.
"""

import dataclasses
import functools
import math

import numpy as np

_POINTS = 256  # Of the grids that expectations are integrated over.


@dataclasses.dataclass(frozen=True)
class Lengths:
  """Tokens of a response: min(log-normal, limit).

  Attributes:
    mean: before the cut, tokens.
    sigma: standard deviation of the logarithm; 0 is one length for all.
    limit: tokens at which a response is cut.
  """

  mean: float
  sigma: float
  limit: float

  def __post_init__(self) -> None:
    if not 0 < self.mean <= self.limit:
      raise ValueError(
        f'mean is {self.mean} and limit {self.limit}; the mean length must be'
        ' above 0 and at most the limit'
      )
    if self.sigma < 0:
      raise ValueError(f'sigma is {self.sigma}; it must be 0 or more')

  def survival(self, length: np.ndarray) -> np.ndarray:
    """Returns the share of responses longer than each length, f64[...]."""
    length = np.asarray(length, float)
    if not self.sigma:
      return (length < self.mean).astype(float)
    scale = self.sigma * math.sqrt(2.0)
    center = math.log(self.mean) - self.sigma**2 / 2
    positive = np.log(np.maximum(length, 1e-300))
    tail = 0.5 * _erfc((positive - center) / scale)
    return np.where(length < self.limit, tail, 0.0)

  def grid(self) -> tuple[np.ndarray, np.ndarray]:
    """Returns midpoints and widths of cells from 0 to the longest response."""
    if not self.sigma:
      return np.array([self.mean / 2]), np.array([self.mean])
    edges = np.linspace(0.0, self.limit, _POINTS + 1)
    return (edges[1:] + edges[:-1]) / 2, np.diff(edges)

  def cells(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns midpoints and widths of `grid`, and the survival there."""
    return _cells(self)

  def expected(self) -> float:
    """Returns the mean length after the cut, tokens."""
    return _moments(self)[0]

  def expected_square(self) -> float:
    """Returns the mean of the squared length after the cut."""
    return _moments(self)[1]

  def expected_longest(self, count: int) -> float:
    """Returns the mean length of the longest of `count` responses, tokens."""
    _, width, survival = self.cells()
    some = 1.0 - (1.0 - survival) ** count
    return float(np.sum(some * width))

  def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
    """Returns i64[count] lengths, at least 1 each."""
    if not self.sigma:
      return np.full(count, max(1, round(self.mean)))
    center = math.log(self.mean) - self.sigma**2 / 2
    values = rng.lognormal(center, self.sigma, count)
    return np.clip(np.ceil(values), 1, int(self.limit)).astype(int)


@functools.lru_cache
def _cells(lengths: Lengths) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  middle, width = lengths.grid()
  return middle, width, lengths.survival(middle)


@functools.lru_cache
def _moments(lengths: Lengths) -> tuple[float, float]:
  """Returns the means of the length and of its square."""
  middle, width, survival = _cells(lengths)
  return (
    float(np.sum(survival * width)),
    float(np.sum(2 * middle * survival * width)),
  )


_erfc = np.vectorize(math.erfc, otypes=[float])
