"""A model's own Jinja chat template, run in a sandbox.

Special tokens inside message texts are broken up by a mark before rendering, and the mark is taken
out after the rendered text has been split at special tokens. So the template sees whole texts (and
may trim or test them), and what a user writes can never become markup.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment

from burnish.core.errors import UserError, one_line
from burnish.model.tokenizer import Tokenizer

# Unicode noncharacters, then private use: marks that no sensible text holds.
_MARKS = [*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF900), *range(0xF0000, 0x100000)]


class ChatTemplate:
    """Renders chats of one model to tokens."""

    def __init__(self, text: str, tokenizer: Tokenizer, *, source: str) -> None:
        """Compile the template.

        Raises:
            UserError: if it is not valid Jinja.
        """
        self.text, self.tokenizer, self.source = text, tokenizer, source
        extensions: list[type[Extension]] = [loopcontrols]
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _fixed_date
        try:
            self._template = environment.from_string(text)
            self.variables = find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateError as error:
            raise UserError(
                f"{source}: the chat template is not valid Jinja ({one_line(error)}).",
                fix="take tokenizer_config.json from the model's own repository.",
            ) from error

    def render(
        self, messages: Sequence[dict[str, Any]], *, tools: Any = None, generate: bool
    ) -> str:
        """The chat as text; `generate` adds the opening of an assistant turn.

        Raises:
            UserError: if the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=list(messages),
                tools=tools or None,
                documents=None,
                add_generation_prompt=generate,
                **self.tokenizer.named,
            )
        except Exception as error:  # a template is a program: it can raise anything
            roles = [message["role"] for message in messages]
            raise UserError(
                f"{self.source}: the chat template refuses messages of roles {roles}"
                f" ({one_line(error)}).",
                fix="check the order of roles, or use another instruct model.",
            ) from error

    def encode(self, text: str, mark: str) -> Iterator[tuple[bool, list[int]]]:
        """Tokens of rendered text in pieces; True for each special token. `mark` vanishes."""
        end = 0
        for match in self.tokenizer.special_pattern.finditer(text):
            if end < match.start():
                yield False, self._plain(text[end : match.start()], mark)
            yield True, [self.tokenizer.special_ids[match.group()]]
            end = match.end()
        if end < len(text):
            yield False, self._plain(text[end:], mark)

    def _plain(self, text: str, mark: str) -> list[int]:
        return self.tokenizer.encode(text.replace(mark, ""))

    def protect(self, value: Any, mark: str) -> Any:
        """Break up special tokens in every string of a JSON-like value."""
        if isinstance(value, str):
            pattern = self.tokenizer.special_pattern
            # Tokens may overlap, so one pass can leave a match behind.
            while pattern.search(value):
                value = pattern.sub(lambda m: m.group()[0] + mark + m.group()[1:], value)
            return value
        if isinstance(value, dict):
            return {
                self.protect(key, mark): self.protect(item, mark) for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.protect(item, mark) for item in value]
        return value


def unused_marks(value: Any, count: int) -> list[str]:
    """`count` characters that occur nowhere in a JSON-like value."""
    text = json.dumps(value, ensure_ascii=False)
    found: list[str] = []
    for code in _MARKS:
        if chr(code) not in text:
            found.append(chr(code))
            if len(found) == count:
                return found
    raise UserError("A message uses every private-use character.", fix="shorten the message.")


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _fixed_date(form: str) -> str:
    """Templates that print today's date would make two runs differ; Llama 3.1's default date."""
    return "26 Jul 2024"
