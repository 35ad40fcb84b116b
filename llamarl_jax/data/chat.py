"""How a problem becomes the text of a prompt: plainly, or as a chat.

Chat templates come with the model file and are rendered in jinja's sandbox,
as they are code written by others. They find there what transformers'
apply_chat_template gives them, but for the date, which is the same every day.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import datetime
import functools
import json
import string
from typing import Any
from typing import Protocol

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# What `strftime_now` tells templates: a run must have the same prompts after
# midnight. Llama 3.2's names this day itself where it is told none.
_TODAY = datetime.datetime(2024, 7, 26)
# Content of a system turn that is written only to be taken off again; not
# likely to be the text of anything else.
_MARK = 'system turn to be left out'


class PromptFormat(Protocol):
  """Turns the fields of a problem into the text the policy continues."""

  def render(self, fields: Mapping[str, Any]) -> str:
    """Returns the prompt."""

  def field_names(self) -> frozenset[str]:
    """Returns the fields `render` needs."""


@dataclasses.dataclass(frozen=True)
class PlainPrompt:
  """A prompt that is a filled-in template and nothing else.

  Attributes:
    template: text with fields in braces, such as '{question} ='; a literal
      brace is written twice.
  """

  template: str = '{question}'

  def __post_init__(self) -> None:
    _field_names(self.template)

  def render(self, fields: Mapping[str, Any]) -> str:
    """Returns the template with its fields filled in."""
    return _fill(self.template, fields)

  def field_names(self) -> frozenset[str]:
    """Returns the fields `render` needs."""
    return _field_names(self.template)


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
  """A prompt that is one user turn, and perhaps the start of the answer.

  Templates may invent a system turn where none is given (SmolLM2's does).
  With `system` None there is no system turn all the same, unless
  `default_system` leaves the matter to the template.

  Attributes:
    chat_template: jinja text from the model file.
    user: template of the user turn, with fields in braces.
    prefill: template of the start of the assistant turn, which the policy
      continues; empty for none.
    system: template of the system turn, or None.
    default_system: with `system` None, keep what the template invents, such as
      a date or 'You are a helpful assistant'.
    bos_token: text of the token, for templates that write it.
    eos_token: likewise.
  """

  chat_template: str
  user: str = '{question}'
  prefill: str = ''
  system: str | None = None
  default_system: bool = False
  bos_token: str = ''
  eos_token: str = ''

  def __post_init__(self) -> None:
    self.field_names()
    try:
      _compiled(self.chat_template)
    except jinja2.TemplateError as error:
      raise ValueError(
        f'The chat template of the model is not valid jinja ({error}): fetch'
        ' the model again, or set prompt.chat=False.'
      ) from error
    if self.system is not None and self.default_system:
      raise ValueError(
        f'system={self.system!r} and default_system exclude each other: drop '
        'one of them.'
      )

  def render(self, fields: Mapping[str, Any]) -> str:
    """Returns the chat up to where the policy goes on writing.

    Raises:
      ValueError: a field is missing, or the template refuses the turns.
    """
    try:
      return self._chat(fields) + _fill(self.prefill, fields)
    except jinja2.TemplateError as error:
      raise ValueError(
        f'The chat template of the model refuses the conversation ({error}):'
        ' change prompt.system or prompt.user, or set prompt.chat=False.'
      ) from error

  def _chat(self, fields: Mapping[str, Any]) -> str:
    """Returns what comes before the prefill."""
    user = {'role': 'user', 'content': _fill(self.user, fields)}
    if self.system is not None:
      system = {'role': 'system', 'content': _fill(self.system, fields)}
      return self._apply([system, user])
    if self.default_system:
      return self._apply([user])
    return self._without_system(user)

  def field_names(self) -> frozenset[str]:
    """Returns the fields `render` needs."""
    templates = (self.user, self.prefill, self.system or '')
    return frozenset().union(*map(_field_names, templates))

  def _without_system(self, user: Mapping[str, str]) -> str:
    """Returns the chat without any system turn, given or invented.

    The text of a system turn is what the template writes for that turn alone;
    taken off the front of the two turns, it leaves the user's.
    """
    system = {'role': 'system', 'content': _MARK}
    try:
      both = self._apply([system, user])
      head = self._apply([system], add_generation_prompt=False)
    except jinja2.TemplateError:
      # A template that refuses system turns does not invent one either.
      return self._apply([user])
    # Nor does one that has no such turn, but drops its text (it is nowhere) or
    # writes it into the user's (it is there, and not in the turn alone).
    if (_MARK in both) != (_MARK in head) or _MARK not in both + head:
      return self._apply([user])
    if not both.startswith(head):
      raise ValueError(
        'The chat template does not write the system turn first, so it cannot '
        'be left out: give a system text or set default_system=True.'
      )
    chat = both[len(head) :]
    # The template may open the text with a token that is no part of the system
    # turn. (SmolLM2's opens every turn, so it is there already.)
    if head.startswith(self.bos_token) and not chat.startswith(self.bos_token):
      chat = self.bos_token + chat
    return chat

  def _apply(
    self,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool = True,
  ) -> str:
    return _compiled(self.chat_template).render(
      messages=messages,
      # None, not undefined: some templates ask only whether they are none.
      tools=None,
      documents=None,
      add_generation_prompt=add_generation_prompt,
      bos_token=self.bos_token,
      eos_token=self.eos_token,
    )


@functools.lru_cache
def _compiled(chat_template: str) -> jinja2.Template:
  # Chat templates are written for these settings, functions and tags.
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[jinja2.ext.loopcontrols, _GenerationTag],
  )
  environment.globals['raise_exception'] = _raise_exception
  environment.globals['strftime_now'] = _TODAY.strftime
  environment.filters['tojson'] = _tojson
  return environment.from_string(chat_template)


class _GenerationTag(jinja2.ext.Extension):
  """Reads {% generation %}, which marks the turns to learn from, as nothing."""

  tags: set[str] = {'generation'}  # noqa: RUF012 (jinja declares it so)

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    """Returns the statements up to the end of the tag."""
    next(parser.stream)
    return parser.parse_statements(('name:endgeneration',), drop_needle=True)


def _tojson(value: Any, **options: Any) -> str:
  """Is jinja's filter without the HTML escapes, as in transformers."""
  return json.dumps(value, **{'ensure_ascii': False, **options})


def _raise_exception(message: str) -> None:
  """Is what chat templates call to refuse a conversation."""
  raise jinja2.TemplateError(message)


def _field_names(template: str) -> frozenset[str]:
  try:
    parts = list(string.Formatter().parse(template))
  except ValueError as error:
    raise ValueError(
      f'Prompt template {template!r}: {error}; write a literal brace twice.'
    ) from error
  names = frozenset(name for _, name, _, _ in parts if name is not None)
  for name in names:
    # '{question.upper}' or '{0}' would reach into the value or an argument.
    if not name.isidentifier():
      raise ValueError(
        f'Prompt template {template!r}: {name!r} is not the name of a field; '
        'write a literal brace twice.'
      )
  return names


def _fill(template: str, fields: Mapping[str, Any]) -> str:
  missing = sorted(_field_names(template) - fields.keys())
  if missing:
    raise ValueError(
      f'Prompt template {template!r} asks for {missing}, but the problem has '
      f'{sorted(fields)}: change the template.'
    )
  return template.format_map(fields)
