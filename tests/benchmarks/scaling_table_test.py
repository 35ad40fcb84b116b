from absl.testing import parameterized

from benchmarks import scaling_model
from benchmarks import scaling_table


class ScalingTableTest(parameterized.TestCase):
  def test_predictions_beside_the_paper(self):
    prediction = scaling_model.predict()
    rows = scaling_table.step_rows(prediction)
    # The 8B row is fitted; speed-ups rise with the model.
    self.assertLess(abs(rows[0]['sync_error']), 0.01)
    self.assertLess(abs(rows[0]['async_error']), 0.01)
    speedups = prediction.speedups()
    self.assertEqual(speedups, sorted(speedups))
    # Of the two that are out of sample, 70B is within a quarter. 405B is not:
    # the paper's system uses twice the device time a parameter there.
    self.assertLess(abs(rows[1]['async_error']), 0.25)
    self.assertBetween(rows[2]['async_error'], -0.5, 0.0)
    text = scaling_table.table(rows)
    self.assertIn('22.45 [U]', text)
    self.assertIn('10.7 [P]', text)

  def test_publication_of_the_first_row_is_fitted(self):
    rows = scaling_table.sync_rows()
    self.assertAlmostEqual(rows[0]['predicted_gathered'], 4.32)
    self.assertAlmostEqual(rows[0]['predicted_direct'], 0.04)
    self.assertIsNone(rows[2]['gathered_error'])
    # Direct publication does not slow down in proportion to the model.
    self.assertLess(
      rows[2]['predicted_direct'] / rows[0]['predicted_direct'],
      rows[2]['predicted_gathered'] / rows[0]['predicted_gathered'],
    )

  def test_every_figure_of_the_paper_has_a_mark(self):
    for row in scaling_model.ROWS:
      for name in ('num_devices', 'baseline', 'llamarl', 'speedup'):
        self.assertIn(getattr(row, name).mark, ('P', 'S', 'U'))
