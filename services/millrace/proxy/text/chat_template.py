"""Renders chat templates: a model's own jinja in a sandbox, with Hugging Face's functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from millrace.core.errors import ModelError
from millrace.proxy.errors import ApiError, shown

#: Longer messages are rendered on a thread: half a millisecond.
INLINE_CHARACTERS = 256 * 1024
_CONTINUED_MARK = "\u0091millrace-continues-here\u0092"


class ChatTemplate:
    """One compiled template. Raises ModelError when it can't be compiled."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        environment.globals.update(special_tokens)
        try:
            self._template = environment.from_string(source)
            # jinja2 copies them at every rendering, and a ChainMap is slow to copy.
            self._template.globals = dict(self._template.globals)
        except TemplateError as error:
            raise ModelError(f"the model's chat template is damaged: {error}") from error
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """Returns the prompt's text. Raises ApiError (400) with the template's own message."""
        shaped = [self._shape(message) for message in messages]
        if continue_final_message:
            shaped[-1] = {**shaped[-1], "content": shaped[-1]["content"] + _CONTINUED_MARK}
        values = {
            "tools": None,
            "documents": None,
            **(arguments or {}),
            "messages": shaped,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(values)
        except _TemplateComplaint as error:
            raise _bad_messages(f"the model's chat template says: {error}") from error
        except Exception as error:  # templates are programs: they may raise any error
            raise _bad_messages(
                f"the model's chat template can't render them: {shown(str(error))}"
            ) from error
        if continue_final_message:
            text = _cut_at_mark(text)
        return text

    async def render_async(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:  # noqa: ANN401
        """Works as `render`; long messages are rendered on a thread.

        A million tokens are joined for some 10 ms, in pieces between which other streams go on.
        """
        if sum(_characters(message.get("content")) for message in messages) <= INLINE_CHARACTERS:
            return self.render(messages, **options)
        return await asyncio.to_thread(self.render, messages, **options)

    def _shape(self, message: Mapping[str, Any]) -> dict[str, Any]:
        shaped = dict(message)
        if shaped["role"] == "developer" and not self._knows_developer:
            shaped["role"] = "system"
        for call in shaped.get("tool_calls", ()):
            # Templates expect the arguments as an object; OpenAI's API sends them as JSON text.
            function = call["function"]
            try:
                call["function"] = {**function, "arguments": json.loads(function["arguments"])}
            except ValueError:
                continue
        return shaped


class _TemplateComplaint(TemplateError):
    """A template called raise_exception."""


def _bad_messages(message: str) -> ApiError:
    return ApiError(400, f"Invalid 'messages': {message}", param="messages", code="invalid_value")


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUED_MARK)
    if position < 0:
        raise ApiError(
            400,
            "Invalid 'continue_final_message': the model's chat template drops the last message.",
            param="continue_final_message",
            code="invalid_value",
        )
    return text[:position]


def _raise_exception(message: str) -> NoReturn:
    raise _TemplateComplaint(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,  # noqa: ANN401 - a template may pass any value
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _characters(content: object) -> int:
    """Returns the characters of a message's content: a text, or parts."""
    if isinstance(content, str):
        return len(content)
    parts = content if isinstance(content, list) else ()
    return sum(len(part.get("text", "")) for part in parts)
