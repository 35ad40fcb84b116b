from absl.testing import parameterized

from llamarl_jax.data import arithmetic
from llamarl_jax.data import chat
from llamarl_jax.data.addressing import Split


def _operands(question):
  return tuple(sorted(int(word) for word in question.split()[::2]))


class ArithmeticTest(parameterized.TestCase):
  @parameterized.parameters(
    ((12, 34), '+', 46),
    ((12, 34), '-', -22),
    ((12, 34), '*', 408),
    # 2 + 3 * 4 - 5 * 6 * 7 + 8 = 2 + 12 - 210 + 8
    ((2, 3, 4, 5, 6, 7, 8), '+*-**+', -188),
    ((-3, -4), '*', 12),
  )
  def test_evaluates_with_products_first(self, operands, operators, value):
    self.assertEqual(arithmetic.evaluate(operands, operators), value)

  def test_answers_are_those_of_python(self):
    source = arithmetic.ArithmeticSource(
      0, operators='+-*', num_operands=4, min_value=-20, max_value=20
    )
    for i in range(200):
      problem = source.problem('train', i)
      # The question is our own text, not a model's.
      self.assertEqual(int(problem.answer), eval(problem.question))
      self.assertEqual(problem.index, i)

  @parameterized.parameters(0, 1, 2, 12345)
  def test_training_never_meets_held_out_operands(self, seed):
    source = arithmetic.ArithmeticSource(seed, max_value=30)
    num_held_out = source.num_problems(Split.HELD_OUT)
    held_out = [source.problem('held_out', i) for i in range(num_held_out)]
    hidden = {_operands(problem.question) for problem in held_out}
    train = [source.problem('train', i) for i in range(3000)]
    seen = {_operands(problem.question) for problem in train}
    self.assertEmpty(hidden & seen)
    # 31 * 32 / 2 = 496 pairs without order; nearly all of the rest turn up.
    self.assertGreater(len(seen), 0.95 * (496 - len(hidden)))

  def test_held_out_problems_are_distinct_and_of_no_seed(self):
    sources = [arithmetic.ArithmeticSource(seed) for seed in (0, 7)]
    first, second = (
      [source.problem('held_out', i) for i in range(256)] for source in sources
    )
    self.assertEqual(first, second)
    self.assertLen({problem.question for problem in first}, 256)
    # Asked in another order, on a fresh source.
    fresh = arithmetic.ArithmeticSource(3)
    self.assertEqual(fresh.problem('held_out', 200), first[200])
    self.assertEqual(fresh.problem('held_out', 5), first[5])

  def test_all_held_out_problems_are_reached_once(self):
    source = arithmetic.ArithmeticSource(0, max_value=9)
    num = source.num_problems('held_out')
    questions = {source.problem('held_out', i).question for i in range(num)}
    self.assertLen(questions, num)
    with self.assertRaisesRegex(ValueError, f'are {num} held-out problems'):
      source.problem('held_out', num)

  def test_training_is_addressed_by_seed_and_index(self):
    source = arithmetic.ArithmeticSource(0)
    stream = [source.problem('train', i) for i in range(50)]
    again = arithmetic.ArithmeticSource(0)
    self.assertEqual(again.problem('train', 37), stream[37])
    other = arithmetic.ArithmeticSource(1)
    same = [other.problem('train', i) == stream[i] for i in range(50)]
    self.assertLess(sum(same), 5)

  def test_operands_are_uniform(self):
    source = arithmetic.ArithmeticSource(
      0, min_value=(0, 5), max_value=(999, 5), held_out_fraction=0
    )
    numbers = [
      _operands(source.problem('train', i).question) for i in range(4000)
    ]
    first = [sum(pair) - 5 for pair in numbers]
    # Mean (n - 1) / 2 = 499.5 with standard error 1000 / sqrt(12 * 4000) = 4.6.
    self.assertBetween(sum(first) / len(first), 499.5 - 18, 499.5 + 18)

  def test_uniform_digits(self):
    source = arithmetic.ArithmeticSource(0, uniform_digits=True)

    def digits(split, count):
      questions = [source.problem(split, i).question for i in range(count)]
      return [(len(q.split()[0]), len(q.split()[2])) for q in questions]

    num_held_out = source.num_problems('held_out')
    held_out = {
      source.problem('held_out', i).question for i in range(num_held_out)
    }
    self.assertLen(held_out, num_held_out)
    train = digits('train', 2000)
    for pair in ((1, 1), (1, 2), (2, 1), (2, 2)):
      # A fair quarter each, with fewer of what is held out in part; standard
      # deviation sqrt(2000 * 3 / 16) = 19.
      self.assertBetween(train.count(pair), 500 - 80, 500 + 80)
      self.assertEqual(digits('held_out', 16).count(pair), 4)

  @parameterized.parameters(False, True)
  def test_non_negative(self, uniform_digits):
    source = arithmetic.ArithmeticSource(
      0,
      max_value=12,
      held_out_fraction=0.3,
      uniform_digits=uniform_digits,
      non_negative=True,
    )
    count = source.num_problems('held_out')
    held_out = [source.problem('held_out', i) for i in range(count)]
    train = [source.problem('train', i) for i in range(300)]
    self.assertTrue(all(int(p.answer) >= 0 for p in [*held_out, *train]))
    self.assertLen({p.question for p in held_out}, count)
    self.assertTrue(any('-' in p.question for p in held_out))
    with self.assertRaisesRegex(ValueError, f'There are {count} held-out'):
      source.problem('held_out', count)

  def test_formats(self):
    source = arithmetic.ArithmeticSource(
      0,
      operators='-',
      min_value=-5,
      max_value=-4,
      held_out_fraction=0,
      question_format='compact',
      prompt_format=chat.PlainPrompt('Q: {question}='),
    )
    questions = {source.problem('train', i).question for i in range(64)}
    self.assertEqual(
      questions, {f'{a}-({b})' for a in (-5, -4) for b in (-5, -4)}
    )
    problem = source.problem('train', 0)
    self.assertEqual(problem.prompt, f'Q: {problem.question}=')

  @parameterized.parameters(
    ({'operators': '/'}, "operators='/'"),
    ({'operators': ''}, "operators=''"),
    ({'operators': '++'}, 'must not repeat'),
    ({'num_operands': 1}, 'num_operands=1'),
    ({'min_value': 10, 'max_value': 9}, 'swap'),
    ({'max_value': (1, 2, 3)}, '2 of them'),
    ({'question_format': 'x'}, "question_format='x'"),
    ({'held_out_fraction': 1.0}, r'in \[0, 1\)'),
    ({'min_value': -1, 'uniform_digits': True}, 'not from -1'),
    ({'max_value': 0}, 'leaves no held-out problem'),
    ({'max_value': 0, 'held_out_fraction': 0.999}, 'leaves no training'),
  )
  def test_bad_arguments(self, arguments, message):
    with self.assertRaisesRegex(ValueError, message):
      arithmetic.ArithmeticSource(0, **arguments)
