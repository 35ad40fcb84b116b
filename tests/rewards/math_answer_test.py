from absl.testing import parameterized

from llamarl_jax.rewards import math_answer
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Problem


def _score(answer, text, reason=FinishReason.STOP, **options):
  return math_answer.math_answer(
    Problem(0, '', answer), text, reason, **options
  )


class MathAnswerTest(parameterized.TestCase):
  # Pairs whose equality is plain to a reader.
  @parameterized.parameters(
    ('18', 'So 9 + 9 = 18.\n#### 18', 1.0),
    ('18', '#### 17', 0.0),
    ('18', '#### $18', 1.0),
    ('18', '#### 18 dollars', 1.0),
    ('18', '#### 18 or 19', 0.0),
    ('18', '#### 17\n#### 18', 1.0),
    ('18', '#### 18\n#### 17', 0.0),
    ('70000', '#### 70,000', 1.0),
    ('-3', '<answer>-3</answer>', 1.0),
    ('-3', '<answer> 4 </answer> no: <answer>\n-3\n</answer>', 1.0),
    ('5', r'<answer>\boxed{5}</answer>', 1.0),
    ('1/2', r'Thus $\boxed{\frac{1}{2}}$.', 1.0),
    ('1/2', r'\boxed{0.5}', 1.0),
    (r'\frac{1}{2}', r'\boxed{\dfrac12}', 1.0),
    ('50%', r'\boxed{0.5}', 1.0),
    # An unfinished box is not an answer; the finished one before it is.
    ('4', r'\boxed{4} \boxed{5', 1.0),
    # Mixed numbers, on either side: 2 + 1/2 = 5/2.
    ('5/2', '#### 2 1/2', 1.0),
    ('2 1/2', '#### 5/2', 1.0),
    ('-5/2', r'\boxed{-2 1/2}', 1.0),
    ('1', '#### 2 1/2', 0.0),
    ('5/2', r'\boxed{2\frac{1}{2}}', 1.0),
    ('5/2', 'The answer is 2 1/2', 1.0),
    # Gold that carries its own signs.
    ('$18$', '#### 18', 1.0),
    (r'\boxed{18}', '#### 18', 1.0),
    (r'\{1, 2\}', r'\boxed{\{2, 1\}}', 1.0),
    ('x + 1', r'\boxed{1 + x}', 1.0),
    ('x + 1', r'\boxed{x}', 0.0),
    (r'\text{blue}', r'\boxed{\text{blue}}', 1.0),
    # Without a marker.
    ('18', 'It must be 18', 1.0),
    ('18', 'I do not know', 0.0),
    ('18', '', 0.0),
    ('18', r'\boxed{}', 0.0),
    # Junk.
    ('18', r'\boxed{\frac{}{' + '{' * 50 + '}', 0.0),
    ('18', r'\boxed{\left( ^ _ \\ }', 0.0),
    ('18', '#### \x00\ud83d', 0.0),
  )
  def test_correct(self, answer, text, expected):
    self.assertEqual(_score(answer, text)['correct'], expected)

  def test_unmarked_answer_of_a_cut_completion(self):
    cut = FinishReason.LENGTH
    self.assertEqual(
      _score('18', 'is 18', cut), {'correct': 0.0, 'parsed': 0.0}
    )
    self.assertEqual(
      _score('18', 'is 18', cut, accept_truncated=True)['correct'], 1.0
    )
    # A marker that was closed says that the answer is whole.
    self.assertEqual(_score('18', r'\boxed{18} and', cut)['correct'], 1.0)

  def test_line_marker_cut_by_length(self):
    cut = FinishReason.LENGTH
    self.assertEqual(_score('18', '#### 18', cut)['correct'], 0.0)
    self.assertEqual(_score('18', '#### 18\n', cut)['correct'], 1.0)

  def test_required_marker(self):
    for text, expected in (('18', 0.0), ('#### 18', 1.0)):
      self.assertEqual(
        _score('18', text, require_marker=True)['correct'], expected
      )

  def test_parsed(self):
    self.assertEqual(_score('18', 'no idea'), {'correct': 0.0, 'parsed': 0.0})
    self.assertEqual(_score('18', '#### 17'), {'correct': 0.0, 'parsed': 1.0})
