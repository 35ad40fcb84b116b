import json

from absl.testing import parameterized
import pytest

from llamarl_jax.data import chat
from llamarl_jax.data import jsonl

GOOD = '{"question": "q", "answer": "1"}'


class JsonlTest(parameterized.TestCase):
  @pytest.fixture(autouse=True)
  def _folder(self, tmp_path):
    self.folder = tmp_path

  def _write(self, *lines, name='data.jsonl'):
    path = self.folder / name
    path.write_bytes(
      b'\n'.join(x if isinstance(x, bytes) else x.encode() for x in lines)
    )
    return str(path)

  def _rows(self, num, name='data.jsonl', first=0):
    rows = [
      {'question': f'question {i}', 'answer': i, 'hint': f'h{i}'}
      for i in range(first, first + num)
    ]
    return self._write(*map(json.dumps, rows), '', name=name)

  def test_epochs_are_permutations_addressed_by_index(self):
    path = self._rows(50)
    source = jsonl.JsonlSource(0, path=path)
    num = source.num_problems('train')
    self.assertEqual(num + source.num_problems('held_out'), 50)
    stream = [source.problem('train', i) for i in range(3 * num)]
    epochs = [stream[i : i + num] for i in (0, num, 2 * num)]
    orders = [tuple(p.answer for p in epoch) for epoch in epochs]
    self.assertLen(set(orders), 3)
    self.assertLen({frozenset(order) for order in orders}, 1)
    self.assertLen({p.index for p in stream}, 3 * num)
    resumed = jsonl.JsonlSource(0, path=path)
    self.assertEqual(resumed.problem('train', 2 * num), stream[2 * num])

  @parameterized.parameters(0, 1)
  def test_splits_are_disjoint_also_for_repeated_questions(self, seed):
    rows = [{'question': f'q{i % 40}', 'answer': i} for i in range(80)]
    path = self._write(*map(json.dumps, rows))
    source = jsonl.JsonlSource(seed, path=path, held_out_fraction=0.3)
    train = {
      source.problem('train', i).question
      for i in range(source.num_problems('train'))
    }
    held_out = [
      source.problem('held_out', i).question
      for i in range(source.num_problems('held_out'))
    ]
    self.assertLen(set(held_out), len(held_out))
    self.assertEmpty(train & set(held_out))
    self.assertEqual(train | set(held_out), {f'q{i}' for i in range(40)})

  def test_held_out_file(self):
    path = self._rows(10)
    held_out = self._rows(5, name='held_out.jsonl', first=8)
    source = jsonl.JsonlSource(0, path=path, held_out_path=held_out)
    # 8 and 9 stand in both files, and are not trained on.
    self.assertEqual(source.num_problems('train'), 8)
    answers = [source.problem('held_out', i).answer for i in range(5)]
    self.assertEqual(answers, ['8', '9', '10', '11', '12'])
    with self.assertRaisesRegex(ValueError, 'There are 5 held-out'):
      source.problem('held_out', 5)

  def test_prompt_and_answer_pattern(self):
    path = self._write(
      '\ufeff' + json.dumps({'q': 'Why {x}?', 'a': 'As 1 + 1.\n#### 1,000 '})
    )
    source = jsonl.JsonlSource(
      0,
      path=path,
      question_field='q',
      answer_field='a',
      answer_pattern=r'####\s*(.+)',
      prompt_format=chat.PlainPrompt('Say {{}}: {q}'),
      held_out_fraction=0,
    )
    problem = source.problem('train', 7)
    self.assertEqual(problem.prompt, 'Say {}: Why {x}?')
    self.assertEqual(problem.answer, '1,000')
    self.assertEqual(problem.metadata, {'line': 1, 'epoch': 7})

  @parameterized.parameters(
    ('{"question": "q",', 'malformed JSON .* at column 18'),
    (b'{"question": "\xff", "answer": 1}', r'not UTF-8 \(byte 15: 0xff\)'),
    ('[1, 2]', 'a JSON list, not an object'),
    ('{"question": "q"}', "no field 'answer'"),
    ('{"question": "q", "answer": null}', "'answer' is None"),
    ('{"question": "q", "answer": true}', "'answer' is True"),
    ('{"question": " ", "answer": 1}', "'question' is empty"),
  )
  def test_bad_line(self, line, message):
    path = self._write(GOOD, '', line, GOOD)
    with self.assertRaisesRegex(ValueError, f'data.jsonl, line 3: .*{message}'):
      jsonl.JsonlSource(0, path=path)

  def test_missing_prompt_field(self):
    path = self._write(GOOD)
    with self.assertRaisesRegex(ValueError, "line 1: no field 'hint'"):
      jsonl.JsonlSource(
        0, path=path, prompt_format=chat.PlainPrompt('{question} {hint}')
      )

  def test_bad_pattern(self):
    path = self._write(GOOD)
    for pattern, message in (
      ('(', 'no regular expression'),
      ('a', 'has 0 groups'),
      ('#(.)', 'line 1: .*finds no answer'),
    ):
      with self.assertRaisesRegex(ValueError, message):
        jsonl.JsonlSource(0, path=path, answer_pattern=pattern)

  def test_bad_file(self):
    with self.assertRaisesRegex(FileNotFoundError, 'no such file'):
      jsonl.JsonlSource(0, path=str(self.folder / 'none.jsonl'))
    with self.assertRaisesRegex(ValueError, 'the file is empty'):
      jsonl.JsonlSource(0, path=self._write('', '  '))
    with self.assertRaisesRegex(ValueError, 'holds out none'):
      jsonl.JsonlSource(0, path=self._write(GOOD), held_out_fraction=0.01)
    with self.assertRaisesRegex(ValueError, 'none of its 1 problems is left'):
      jsonl.JsonlSource(0, path=self._write(GOOD), held_out_fraction=0.99)
