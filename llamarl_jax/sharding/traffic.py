"""What a slice plan asks of the network, and how long that must take.

A link is the network interface of a device, or of several that share one; it
carries so many bits a second each way at a time. The busiest link bounds the
time from below, whatever the order of the slices.
"""

import numpy as np

from llamarl_jax.sharding import reshard


def link_bytes(
  plan: reshard.SlicePlan, *, devices_per_link: int = 1
) -> tuple[np.ndarray, np.ndarray]:
  """Returns bytes sent by link of the source, i64, and received likewise.

  Args:
    plan: of the transfer.
    devices_per_link: devices, in order of ordinals, that share a link.
  """
  sent, received = plan.traffic()
  return _by_link(sent, devices_per_link), _by_link(received, devices_per_link)


def predict_seconds(
  plan: reshard.SlicePlan,
  *,
  link_bits_per_second: float,
  devices_per_link: int = 1,
) -> float:
  """Returns how long the busiest link is busy.

  Args:
    plan: of the transfer.
    link_bits_per_second: what one link carries, each way at a time.
    devices_per_link: devices, in order of ordinals, that share a link.
  """
  links = link_bytes(plan, devices_per_link=devices_per_link)
  busiest = max(int(num_bytes.max(initial=0)) for num_bytes in links)
  return busiest * 8 / link_bits_per_second


def describe(
  plan: reshard.SlicePlan,
  *,
  link_bits_per_second: float = 400e9,
  devices_per_link: int = 1,
) -> str:
  """Returns a plan as a short report, with a predicted time.

  Args:
    plan: of the transfer.
    link_bits_per_second: what one link carries, each way at a time.
    devices_per_link: devices, in order of ordinals, that share a link.
  """
  sent, received = link_bytes(plan, devices_per_link=devices_per_link)
  most_sent, most_received = (
    int(num_bytes.max(initial=0)) for num_bytes in (sent, received)
  )
  if most_sent >= most_received:
    number = int(sent.argmax()) if sent.size else 0
    busiest = f'source link {number} sends {most_sent:,} bytes'
  else:
    number = int(received.argmax())
    busiest = f'destination link {number} receives {most_received:,} bytes'
  seconds = predict_seconds(
    plan,
    link_bits_per_second=link_bits_per_second,
    devices_per_link=devices_per_link,
  )
  return '\n'.join(
    (
      f'{len(plan):,} slices of {len(plan.leaves)} leaves, from'
      f' {plan.num_sources} devices to {plan.num_destinations}:'
      f' {plan.num_bytes:,} bytes',
      f'sent by each of {len(sent)} links: {_spread(sent)}',
      f'received by each of {len(received)} links: {_spread(received)}',
      f'busiest: {busiest}',
      f'predicted at {link_bits_per_second / 1e9:g} Gb/s a link:'
      f' {seconds:.3g} s',
    )
  )


def _by_link(num_bytes: np.ndarray, devices_per_link: int) -> np.ndarray:
  """Returns bytes by link, of bytes by device."""
  starts = np.arange(0, len(num_bytes), devices_per_link)
  return np.add.reduceat(num_bytes, starts) if len(starts) else num_bytes


def _spread(num_bytes: np.ndarray) -> str:
  """Returns least, most and mean, in words."""
  if not num_bytes.size:
    return 'nothing'
  return (
    f'{num_bytes.min():,} to {num_bytes.max():,} bytes,'
    f' {num_bytes.mean():,.0f} on average'
  )
