"""What the controller knows of a generator replica."""

import dataclasses

from llamarl_jax import types
from llamarl_jax.channels import weights
from llamarl_jax.controller.launchers import base

# How long a fetch that failed is not tried again.
_RETRY_SECONDS = 1.0


@dataclasses.dataclass
class Replica:
  """One generator replica.

  Attributes:
    handle: to send commands to.
    capacity: completions it may hold, waiting or being generated.
    drains: whether it finishes what it holds before it takes a new version.
    destination: where it needs its parameters; None before it was asked.
    held: version it uses.
    fetched: newest version it has fetched.
    manifest: of an offer that it is to fetch.
    fetching: whether a version is on its way to it, from the offer on.
    retry_at: when to offer again what it failed to fetch, in seconds since the
      epoch.
    outstanding: completions it still has to make.
    busy: whether a command is under way.
  """

  handle: base.Handle
  capacity: int
  drains: bool = False
  destination: weights.Destination | None = None
  held: types.Version | None = None
  fetched: types.Version | None = None
  manifest: weights.Manifest | None = None
  fetching: bool = False
  retry_at: float | None = None
  outstanding: int = 0
  busy: bool = False

  @property
  def room(self) -> int:
    """Completions it may take now."""
    return 0 if self.draining else self.capacity - self.outstanding

  @property
  def draining(self) -> bool:
    """Whether it has to finish what it holds, for a version that waits."""
    return self.drains and self.outstanding > 0 and self._has_newer

  @property
  def next_version(self) -> types.Version | None:
    """The version it should flip to now, if any."""
    return self.fetched if self._has_newer and not self.draining else None

  @property
  def _has_newer(self) -> bool:
    return self.fetched is not None and (
      self.held is None or self.held < self.fetched
    )

  def note(self, report: types.StepReport, now: float) -> None:
    """Takes what it reports of a step.

    Args:
      report: of the step.
      now: seconds since the epoch.
    """
    self.busy = False
    if report.fetched is not None and report.fetched != self.fetched:
      self.fetched = report.fetched
      self.fetching = False
    if report.fetch_failed:
      self.retry_at = now + _RETRY_SECONDS
    if report.unfinished is None:
      self.outstanding -= sum(len(g.completions) for g in report.outputs)
    else:
      # Slots fall free one by one, long before their groups are complete.
      self.outstanding = report.unfinished
