"""pass@k: how often one of k samples is right."""

import math


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
  """Returns the unbiased estimate of pass@k for one problem.

  pass@k = 1 - C(n - c, k) / C(n, k)

  Chen et al. (2021), https://arxiv.org/abs/2107.03374, equation 1.

  Args:
    num_samples: samples drawn of the problem (n).
    num_correct: those that were right (c).
    k: at least 1 and at most n.

  Raises:
    ValueError: a number is out of its range.
  """
  if not 1 <= k <= num_samples:
    raise ValueError(
      f'k={k} must be between 1 and the number of samples, {num_samples}'
    )
  if not 0 <= num_correct <= num_samples:
    raise ValueError(
      f'num_correct={num_correct} must be between 0 and {num_samples}'
    )
  wrong = num_samples - num_correct
  return 1.0 - math.comb(wrong, k) / math.comb(num_samples, k)
