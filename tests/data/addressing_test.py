from absl.testing import parameterized

from llamarl_jax.data import addressing


class AddressingTest(parameterized.TestCase):
  def test_draws_are_the_same_everywhere(self):
    # blake2b of '1:0,5:train,', by the command line tool b2sum -l 64.
    self.assertEqual(addressing.draw(0, 'train'), 0x8186671236B0FDA6)

  def test_parts_of_an_address_do_not_run_together(self):
    self.assertNotEqual(addressing.draw(1, 23), addressing.draw(12, 3))

  @parameterized.parameters(1, 2, 3, 5, 64, 100, 257)
  def test_permutes(self, size):
    places = [addressing.permuted(i, size, 'key') for i in range(size)]
    self.assertCountEqual(places, range(size))

  def test_addresses_give_other_permutations(self):
    first, second = (
      [addressing.permuted(i, 100, key) for i in range(100)] for key in (0, 1)
    )
    fixed = sum(a == b for a, b in zip(first, second, strict=True))
    self.assertLess(fixed, 8)  # One on average.

  def test_holds_out_the_fraction(self):
    held = sum(addressing.is_held_out(0.25, i) for i in range(10_000))
    # Standard deviation sqrt(10,000 * 0.25 * 0.75) = 43.
    self.assertBetween(held, 2500 - 175, 2500 + 175)

  def test_a_larger_fraction_holds_out_more_of_the_same(self):
    for i in range(200):
      if addressing.is_held_out(0.1, i):
        self.assertTrue(addressing.is_held_out(0.3, i))

  def test_place_outside(self):
    with self.assertRaisesRegex(ValueError, r'5 is outside \[0, 5\)'):
      addressing.permuted(5, 5)
