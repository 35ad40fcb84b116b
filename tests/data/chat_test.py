from absl.testing import parameterized

from llamarl_jax.data import chat

# Invents a system turn, as SmolLM2's does.
INVENTING = (
  "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}"
  '<s>system: be nice</s>{% endif %}'
  "<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}"
  '{% if add_generation_prompt %}<s>assistant: {% endif %}'
)
# Opens with a token of its own, as Llama 3's does.
WITH_BOS = (
  "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }};"
  '{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}'
)
REFUSING = (
  "{% for m in messages %}{% if m['role'] == 'system' %}"
  "{{ raise_exception('no system turns') }}{% endif %}"
  "{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
)
SYSTEM_LAST = (
  "{% for m in messages | reverse %}{{ m['role'] }}{{ m['content'] }}"
  '{% endfor %}'
)
# Write the system's text into the turn of the user, as Llama 2's and Mistral's
# do, or drop it.
INTO_USER = (
  "{% if messages[0]['role'] == 'system' %}"
  "{% set text = messages[0]['content'] ~ '|' %}{% set rest = messages[1:] %}"
  '{% else %}{% set text = "" %}{% set rest = messages %}{% endif %}'
  "{% for m in rest %}{{ bos_token }}[I]{{ text }}{{ m['content'] }}[/I]"
  '{% endfor %}'
)
DROPPING = "{% for m in messages if m['role'] == 'user' %}{{ m['content'] }}:"
DROPPING += '{% endfor %}'
# Has a system turn of its own with the date, and adds what it is given, as
# Llama 3.2's does.
DATED = (
  "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
  "{% set text = messages[0]['content'] %}{% set rest = messages[1:] %}"
  "{% else %}{% set text = '' %}{% set rest = messages %}{% endif %}"
  "[system]{{ strftime_now('%d %b %Y') }};{{ text }}<eot>"
  "{% for m in rest %}[user]{{ m['content'] }}<eot>{% endfor %}"
  '{% if add_generation_prompt %}[assistant]{% endif %}'
)


class ChatTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ('inventing', INVENTING, '<s>user: 1 + 1 =</s><s>assistant: 1 + 1 ='),
    ('with_bos', WITH_BOS, '<bos>[user]1 + 1 =;[assistant]1 + 1 ='),
    ('refusing', REFUSING, 'user>1 + 1 =\n1 + 1 ='),
    ('into_user', INTO_USER, '<bos>[I]1 + 1 =[/I]1 + 1 ='),
    ('dropping', DROPPING, '1 + 1 =:1 + 1 ='),
    ('dated', DATED, '<bos>[user]1 + 1 =<eot>[assistant]1 + 1 ='),
  )
  def test_no_system_turn(self, template, expected):
    prompt = chat.ChatPrompt(
      template,
      user='{question} =',
      prefill='{question} =',
      bos_token='<bos>',
    )
    self.assertEqual(prompt.render({'question': '1 + 1'}), expected)

  def test_bos_that_opens_every_turn_is_written_once(self):
    prompt = chat.ChatPrompt(INVENTING, bos_token='<s>')
    self.assertEqual(
      prompt.render({'question': 'q'}), '<s>user: q</s><s>assistant: '
    )

  def test_default_system_turn(self):
    prompt = chat.ChatPrompt(INVENTING, default_system=True)
    self.assertEqual(
      prompt.render({'question': 'q'}),
      '<s>system: be nice</s><s>user: q</s><s>assistant: ',
    )

  def test_given_system_turn(self):
    prompt = chat.ChatPrompt(WITH_BOS, system='{tone}', bos_token='<bos>')
    self.assertEqual(
      prompt.render({'question': 'q', 'tone': 'kind'}),
      '<bos>[system]kind;[user]q;[assistant]',
    )
    self.assertEqual(prompt.field_names(), {'question', 'tone'})

  def test_template_runs_in_a_sandbox(self):
    prompt = chat.ChatPrompt("{{ ''.__class__.__mro__ }}", default_system=True)
    with self.assertRaisesRegex(ValueError, "'__class__'.*is unsafe"):
      prompt.render({'question': 'q'})

  def test_the_date_is_the_same_every_day(self):
    prompt = chat.ChatPrompt(DATED, default_system=True, bos_token='<bos>')
    self.assertEqual(
      prompt.render({'question': 'q'}),
      '<bos>[system]26 Jul 2024;<eot>[user]q<eot>[assistant]',
    )

  def test_refused_and_damaged_templates(self):
    prompt = chat.ChatPrompt(REFUSING, system='be kind')
    with self.assertRaisesRegex(ValueError, 'no system turns.*prompt.system'):
      prompt.render({'question': 'q'})
    with self.assertRaisesRegex(ValueError, 'not valid jinja.*chat=False'):
      chat.ChatPrompt('{% for m in messages %}')

  def test_system_turn_that_cannot_be_left_out(self):
    with self.assertRaisesRegex(ValueError, 'default_system=True'):
      chat.ChatPrompt(SYSTEM_LAST).render({'question': 'q'})

  @parameterized.parameters('{', '{question.upper}', '{0}', '{}')
  def test_bad_template(self, template):
    with self.assertRaisesRegex(ValueError, 'literal brace twice'):
      chat.PlainPrompt(template)

  def test_missing_field(self):
    with self.assertRaisesRegex(ValueError, r"asks for \['hint'\]"):
      chat.PlainPrompt('{hint}').render({'question': 'q'})

  def test_braces_in_values_stay(self):
    text = chat.PlainPrompt('{question}').render({'question': '{x}'})
    self.assertEqual(text, '{x}')
