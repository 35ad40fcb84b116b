"""Traffic of plans whose bytes can be counted by hand."""

from absl.testing import parameterized
import numpy as np

from llamarl_jax.sharding import reshard
from llamarl_jax.sharding import traffic

_WHOLE = ((0, 10),)
_HALVES = (((0, 5),), ((5, 10),))


def _plan(source, destination, itemsize=4):
  return reshard.plan_slices(
    {'w': reshard.ShardMap((10,), source)},
    {'w': reshard.ShardMap((10,), destination)},
    {'w': itemsize},
  )


class TrafficTest(parameterized.TestCase):
  def test_halves_to_three_copies(self):
    # Each of two devices sends its 20 bytes three times; each of three gets 40.
    plan = _plan(_HALVES, (_WHOLE,) * 3)
    sent, received = traffic.link_bytes(plan)
    np.testing.assert_array_equal(sent, [60, 60])
    np.testing.assert_array_equal(received, [40, 40, 40])
    self.assertEqual(
      traffic.predict_seconds(plan, link_bits_per_second=80.0), 6.0
    )
    self.assertEqual(
      traffic.describe(plan, link_bits_per_second=1e9).splitlines(),
      [
        '6 slices of 1 leaves, from 2 devices to 3: 120 bytes',
        'sent by each of 2 links: 60 to 60 bytes, 60 on average',
        'received by each of 3 links: 40 to 40 bytes, 40 on average',
        'busiest: source link 0 sends 60 bytes',
        'predicted at 1 Gb/s a link: 4.8e-07 s',
      ],
    )

  def test_devices_share_links(self):
    plan = _plan(_HALVES, (_WHOLE,) * 3)
    sent, received = traffic.link_bytes(plan, devices_per_link=2)
    np.testing.assert_array_equal(sent, [120])
    np.testing.assert_array_equal(received, [80, 40])

  def test_one_that_receives_may_be_the_busiest(self):
    plan = _plan(_HALVES, (_WHOLE,), itemsize=1)
    self.assertIn('destination link 0 receives 10', traffic.describe(plan))
    self.assertEqual(
      traffic.predict_seconds(plan, link_bits_per_second=8.0), 10.0
    )

  def test_nothing_to_move(self):
    plan = reshard.plan_slices({}, {}, {})
    self.assertIn('0 slices of 0 leaves', traffic.describe(plan))
    self.assertEqual(
      traffic.predict_seconds(plan, link_bits_per_second=1.0), 0.0
    )
