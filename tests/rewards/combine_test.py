import pickle

from absl.testing import parameterized

from llamarl_jax.rewards import catalog
from llamarl_jax.rewards import combine
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Problem

PROBLEM = Problem(0, '', '46')
THINKING = r'<think>.*</think>\s*\d+'


class CombineTest(parameterized.TestCase):
  @parameterized.parameters(
    # total = 1.0 * correct + 0.25 * format
    ('<think>a</think> 46', 1.0, 1.0, 1.25),
    ('<think>a</think> 45', 0.0, 1.0, 0.25),
    ('46', 1.0, 0.0, 1.0),
    ('', 0.0, 0.0, 0.0),
  )
  def test_weighted_sum(self, text, correct, form, total):
    reward = combine.WeightedSum(
      (
        catalog.make_reward('first_number'),
        catalog.make_reward('format', pattern=THINKING),
      ),
      {'correct': 1.0, 'format': 0.25},
    )
    expected = {'correct': correct, 'format': form, 'total': total}
    for scorer in (reward, pickle.loads(pickle.dumps(reward))):
      self.assertEqual(scorer(PROBLEM, text, FinishReason.STOP), expected)

  def test_part_without_weight_is_shown_only(self):
    reward = combine.WeightedSum(
      (catalog.make_reward('math'),), {'correct': 2.0}
    )
    self.assertEqual(
      reward(PROBLEM, '#### 46', FinishReason.STOP),
      {'correct': 1.0, 'parsed': 1.0, 'total': 2.0},
    )

  def test_prefilled_prefix(self):
    scorer = catalog.make_reward('format', pattern=THINKING, prefix='<think>')
    for text, expected in (('a\n</think>\n46', 1.0), ('a 46', 0.0)):
      parts = scorer(PROBLEM, text, FinishReason.STOP)
      self.assertEqual(parts, {'format': expected})

  def test_bad_sums(self):
    exact = catalog.make_reward('exact')
    with self.assertRaisesRegex(ValueError, "named 'correct'"):
      combine.WeightedSum((exact, exact), {'correct': 1.0})(
        PROBLEM, '46', FinishReason.STOP
      )
    with self.assertRaisesRegex(
      ValueError, r"\['format'\], which have weights"
    ):
      combine.WeightedSum((exact,), {'format': 1.0})(
        PROBLEM, '46', FinishReason.STOP
      )
    with self.assertRaisesRegex(ValueError, 'at least one of each'):
      combine.WeightedSum((), {})

  @parameterized.parameters(
    ('nope', {}, "'nope' must be one of"),
    ('exact', {'x': 1}, r"no options \['x'\]"),
    ('format', {}, r"needs the options \['pattern'\]"),
  )
  def test_bad_names(self, name, options, message):
    with self.assertRaisesRegex(ValueError, message):
      catalog.make_reward(name, **options)
