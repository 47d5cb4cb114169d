"""Turns the events of a parsed answer into the JSON of OpenAI's messages and deltas."""

from __future__ import annotations

import string
from hashlib import sha256
from typing import Any

from millrace.proxy.parsing.custom_input import InputReader
from millrace.proxy.parsing.events import (
    Arguments,
    CallStarted,
    Content,
    Event,
    Parser,
    Reasoning,
)
from millrace.proxy.request.options import Options

Json = dict[str, Any]

_LETTERS = string.ascii_letters + string.digits


class ParsedAnswer:
    """The parsed output of one choice. `id_length` fixes the length of call ids; 0: any.

    Call ids follow from `name`, which no other choice has, and from the text: a choice that is
    parsed again has the same ids.
    """

    def __init__(self, parser: Parser, options: Options, name: str, *, id_length: int = 0) -> None:
        self._parser = parser
        self._name = name
        self._reasoning = options.include_reasoning
        tools = options.tools
        self._legacy = tools is not None and tools.legacy
        self._parallel = tools is None or tools.parallel
        self._allowed = None if tools is None else tools.allowed
        self._custom = frozenset[str]() if tools is None else tools.custom
        self._input: InputReader | None = None  # of the last call, if its tool is custom
        self._id_length = id_length
        self._calls = 0  # that are shown
        self._shows = False  # the last call

    def deltas(self, text: str, *, ends: bool) -> list[Json]:
        """Takes the next text, and returns the deltas that are certain; all of them at the end."""
        events = self._parser.feed(text) if text else []
        if ends:
            events += self._parser.finish()
        return [delta for delta in map(self._delta, events) if delta is not None]

    def finish_reason(self, reason: str | None) -> str | None:
        """Returns the finish reason that the client sees."""
        if reason != "stop" or not self._calls:
            return reason
        return "function_call" if self._legacy else "tool_calls"

    def message(self, text: str) -> Json:
        """Returns the message of a whole answer."""
        found: dict[str, list[str]] = {"content": [], "reasoning": []}
        calls: list[Json] = []
        for delta in self.deltas(text, ends=True):
            for name, parts in found.items():
                parts.append(delta.get(name, ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({k: v for k, v in call.items() if k != "index"})
                elif "custom" in call:
                    calls[-1]["custom"]["input"] += call["custom"]["input"]
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
            if called := delta.get("function_call"):
                if "name" in called:
                    calls.append({"function": called})
                else:
                    calls[-1]["function"]["arguments"] += called["arguments"]
        content, reasoning = ("".join(parts) for parts in found.values())
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if reasoning:
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        if calls:
            message["content"] = content or None
            name = "function_call" if self._legacy else "tool_calls"
            message[name] = calls[0]["function"] if self._legacy else calls
        return message

    def _delta(self, event: Event) -> Json | None:
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            if not self._reasoning:
                return None
            return {"reasoning_content": event.text, "reasoning": event.text}
        if isinstance(event, CallStarted):
            self._shows = self._may_show(event.name)
        return self._call_delta(event) if self._shows else None

    def _may_show(self, name: str) -> bool:
        """Whether the client sees a call: of an allowed tool, and only the first if it says so."""
        allowed = self._allowed is None or name in self._allowed
        return allowed and (self._parallel or self._calls == 0)

    def _call_delta(self, event: CallStarted | Arguments) -> Json | None:
        called, starts = self._called(event), isinstance(event, CallStarted)
        if called is None:
            return None
        if self._legacy:
            return {"function_call": called}
        kind = "function" if self._input is None else "custom"
        call: Json = {"index": self._calls - 1, kind: called}
        if starts:
            call |= {"id": self._new_id(), "type": kind}
        return {"tool_calls": [call]}

    def _called(self, event: CallStarted | Arguments) -> Json | None:
        """Returns what an event adds to its call; None if that is nothing yet."""
        if isinstance(event, CallStarted):
            self._calls += 1
            self._input = InputReader() if event.name in self._custom else None
            return {"name": event.name, "arguments" if self._input is None else "input": ""}
        if self._input is None:
            return {"arguments": event.text}
        text = self._input.read(event.text)
        return {"input": text} if text else None

    def _new_id(self) -> str:
        digest = sha256(f"{self._name}/{self._calls}".encode())
        if self._id_length:
            return "".join(_LETTERS[byte % len(_LETTERS)] for byte in digest.digest())[
                : self._id_length
            ]
        return f"call_{digest.hexdigest()[:24]}"
