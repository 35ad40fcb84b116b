from absl.testing import parameterized

from llamarl_jax.rewards import exact_answer
from llamarl_jax.types import FinishReason
from llamarl_jax.types import Problem

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


class ExactAnswerTest(parameterized.TestCase):
  @parameterized.parameters(
    ('46', ' 46', 1.0),
    ('46', '46.', 1.0),
    ('46', 'It is 46, not 47', 1.0),
    ('46', 'It is 47, not 46', 0.0),
    ('46', '+46', 1.0),
    ('46', '046', 1.0),
    ('46', '46.0', 1.0),
    ('46', '46.5', 0.0),
    ('46', '-46', 0.0),
    ('46', '', 0.0),
    ('46', 'forty-six', 0.0),
    ('46', '4 6', 0.0),
    ('46', '462', 0.0),
    ('-5', '= -5', 1.0),
    ('-5', '\N{MINUS SIGN}5', 1.0),
    ('-5', '5', 0.0),
    ('0', '-0', 1.0),
    ('1234', '1,234', 1.0),
    ('1', '1,23', 1.0),
    ('1,234', '1234', 1.0),
    # Digits of another script are no answer, and no error.
    ('3', '\N{ARABIC-INDIC DIGIT THREE}', 0.0),
    # More digits than int() takes.
    ('3', '3' * 10_000, 0.0),
    # Never evaluated.
    ('46', '__import__("os").getpid()', 0.0),
  )
  def test_first_number(self, answer, text, expected):
    parts = exact_answer.first_number(Problem(0, '', answer), text, STOP)
    self.assertEqual(parts, {'correct': expected})

  @parameterized.parameters(
    ('46', LENGTH, True, 1.0),
    ('46', LENGTH, False, 0.0),
    ('46', STOP, False, 1.0),
    # Something follows the number, so it is whole.
    ('46 ', LENGTH, False, 1.0),
  )
  def test_number_cut_by_length(self, text, reason, accept, expected):
    parts = exact_answer.first_number(
      Problem(0, '', '46'), text, reason, accept_truncated=accept
    )
    self.assertEqual(parts, {'correct': expected})

  def test_answer_that_is_no_integer(self):
    for answer in ('blue', '1/2', '2.5', ''):
      with self.assertRaisesRegex(ValueError, 'Problem 3: .*not an integer'):
        exact_answer.first_number(Problem(3, '', answer), '1', STOP)

  @parameterized.parameters(
    ('46', STOP, False, 1.0),
    (' 46\n', STOP, False, 1.0),
    ('046', STOP, False, 0.0),
    ('46.', STOP, False, 0.0),
    ('46', LENGTH, False, 0.0),
    ('46', LENGTH, True, 1.0),
  )
  def test_exact(self, text, reason, accept, expected):
    parts = exact_answer.exact(
      Problem(0, '', '46'), text, reason, accept_truncated=accept
    )
    self.assertEqual(parts, {'correct': expected})
