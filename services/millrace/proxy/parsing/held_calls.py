"""Parses tool calls that no JSON holds: Python calls, and Qwen3-Coder's XML.

A list of Python calls, or one XML call, is held until it is complete and then passed on. Text that
turns out not to be a call becomes content.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from millrace.proxy.parsing.events import Arguments, CallStarted, Markers
from millrace.proxy.parsing.json_calls import MOST_HELD
from millrace.proxy.parsing.state_parser import StateParser

_MOST_SPACES = 512

Calls = list[tuple[str, dict[str, Any]]]

_LIST_BEGINS = re.compile(r"\s*\[\s*(?:[A-Za-z_][\w.-]*\s*)?")
_QUOTES_AND_BRACKETS = re.compile(r"[\"'\\()\[\]{}]")
_PYTHON_NAME = re.compile(r"[\w.]{1,256}")
_NAMES = {"true": True, "false": False, "null": None}


class Held(Protocol):
    """Finds the end of one held piece."""

    def end(self, text: str) -> int | None:
        """Returns the length of the complete piece; None: more text is needed; -1: no call.

        `text` begins after the marker, and grows from call to call.
        """

    def calls(self, text: str) -> Calls | None:
        """Returns the calls of the complete piece; None: no call."""


class PythonList:
    """`[f(a=1), g(b="x")]`, as Llama 3.2 and Llama 4 write it."""

    def __init__(self) -> None:
        self._at, self._depth, self._quote = 0, 0, ""
        self._named = False

    def end(self, text: str) -> int | None:
        if not self._named:
            begun = _LIST_BEGINS.match(text)
            if not text.strip() or (begun is not None and begun.end() == len(text)):
                return None
            if begun is None or text[begun.end()] != "(":
                return -1
            self._named = True
        return self._closing(text)

    def _closing(self, text: str) -> int | None:
        while found := _QUOTES_AND_BRACKETS.search(text, self._at):
            character = found.group()
            if character == "\\":
                if found.end() == len(text):
                    return None
                self._at = found.end() + 1
                continue
            self._at = found.end()
            if self._quote:
                self._quote = "" if character == self._quote else self._quote
            elif character in "\"'":
                self._quote = character
            else:
                self._depth += 1 if character in "([{" else -1
                if self._depth == 0:
                    return self._at
        self._at = len(text)
        return None

    def calls(self, text: str) -> Calls | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of unknown escapes in strings
                tree = ast.parse(text.strip(), mode="eval").body
            return [_call(node) for node in tree.elts] if isinstance(tree, ast.List) else None
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return None


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    """Returns name and arguments of a call. Raises ValueError if it is no call with literals."""
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call with named arguments")
    arguments = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("an argument without a name")
        arguments[keyword.arg] = _literal(keyword.value)
    _json_text(arguments)
    name = ast.unparse(node.func)
    if not _PYTHON_NAME.fullmatch(name):
        raise ValueError("no name")
    return name, arguments


def _literal(node: ast.expr) -> Any:  # noqa: ANN401 - any JSON
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        if not all(isinstance(k, ast.Constant) and isinstance(k.value, str) for k in node.keys):
            raise ValueError("a key that is no string")
        keys = [k.value for k in node.keys if isinstance(k, ast.Constant)]
        return dict(zip(keys, map(_literal, node.values), strict=True))
    if isinstance(node, ast.Name) and node.id in _NAMES:
        return _NAMES[node.id]
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError("no JSON")
    return value


_FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_OPENING = "<function="
_END = "</function>"


class XmlCall:
    """`<function=f><parameter=x>1</parameter></function>`, as Qwen3-Coder writes it.

    `schemas` holds the parameters' JSON schema by function: text is JSON unless a string is wanted.
    """

    def __init__(self, schemas: Mapping[str, Any]) -> None:
        self._schemas = schemas
        self._at = 0
        self._opened = False

    def end(self, text: str) -> int | None:
        if not self._opened:
            opening = text.lstrip()[: len(_OPENING)]
            if not _OPENING.startswith(opening):
                return -1
            self._opened = opening == _OPENING
        found = text.find(_END, max(0, self._at - len(_END)))
        self._at = len(text)
        return None if found < 0 else found + len(_END)

    def calls(self, text: str) -> Calls | None:
        found = _FUNCTION.fullmatch(text)
        if found is None:
            return None
        name, body = found.groups()
        schema = self._schemas.get(name)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        arguments: dict[str, Any] = {}
        at = 0
        while at < len(body):
            parameter = _PARAMETER.match(body, at)
            if parameter is None:
                return None if body[at:].strip() else [(name, arguments)]
            key, value = parameter.groups()
            wanted = properties.get(key) if isinstance(properties, dict) else None
            arguments[key] = _typed(value, wanted)
            at = parameter.end()
        return [(name, arguments)]


def _typed(text: str, schema: object) -> Any:  # noqa: ANN401 - any JSON
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if kinds == "string" or (kinds is None and isinstance(schema, dict) and "enum" in schema):
        return text
    try:
        value = json.loads(text, parse_constant=_refuse)
        _json_text(value)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)
    return value


def _json_text(value: object) -> str:
    """Returns JSON. Raises ValueError for infinity, and for half of a surrogate pair."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    text.encode()
    return text


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


class HeldCalls(StateParser):
    """Parses one answer of a family whose calls are held.

    A call begins after one of `markers`, with one of `kept` (which belong to the piece), or with
    `bare` at the beginning of the answer; `known` accepts the names of bare calls.
    """

    def __init__(
        self,
        make: Callable[[], Held],
        *,
        markers: tuple[str, ...],
        kept: tuple[str, ...] = (),
        bare: str = "",
        closers: tuple[str, ...] = (),
        known: Callable[[str], bool] = lambda name: True,
    ) -> None:
        super().__init__(self._beginning if bare else self._text)
        self._make, self._kept, self._closers, self._known = make, kept, closers, known
        self._markers = Markers(*markers, *kept)
        self._bare = bare
        self._is_bare = False
        self._held = make()
        self._raw = ""
        self._calls = 0

    def _end(self) -> None:
        rest = self._raw + self._buffer
        self._raw = self._buffer = ""
        if self._state != self._after or rest.strip():
            self._show(rest)

    def _beginning(self) -> bool:
        stripped = self._buffer.lstrip()
        spaces = len(self._buffer) - len(stripped)
        if not stripped and spaces <= _MOST_SPACES:
            return False
        if not stripped.startswith(self._bare) or spaces > _MOST_SPACES:
            return self._go(self._text)
        self._is_bare = True
        return self._open(self._buffer[:spaces], stripped)

    def _text(self) -> bool:
        marker = self._show_to(self._markers)
        if marker is None:
            return False
        self._is_bare = False
        return self._open_marked(marker, self._buffer)

    def _open_marked(self, marker: str, text: str) -> bool:
        if marker in self._kept:
            return self._open("", text)
        return self._open(marker, text[len(marker) :])

    def _open(self, raw: str, rest: str) -> bool:
        self._raw, self._buffer, self._held = raw, rest, self._make()
        return self._go(self._inside)

    def _inside(self) -> bool:
        end = self._held.end(self._buffer[:MOST_HELD])
        if end is None and len(self._buffer) < MOST_HELD:
            return False
        calls = self._held.calls(self._buffer[:end]) if end is not None and end > 0 else None
        if not calls or (self._is_bare and not all(self._known(name) for name, _ in calls)):
            return self._fail()
        self._buffer, self._raw = self._buffer[end:], ""
        for name, arguments in calls:
            self._events.append(CallStarted(self._calls, name))
            self._events.append(Arguments(self._calls, _json_text(arguments)))
            self._calls += 1
        return self._go(self._after)

    def _fail(self) -> bool:
        """Makes the marker, or the first character of a call without one, content."""
        if not self._raw.strip():
            self._raw, self._buffer = self._raw + self._buffer[:1], self._buffer[1:]
        self._show(self._raw)
        self._raw = ""
        return self._go(self._text)

    def _after(self) -> bool:
        stripped = self._buffer.lstrip()
        if len(self._buffer) - len(stripped) > _MOST_SPACES:
            return self._go(self._text)
        for closer in self._closers:
            if stripped.startswith(closer):
                self._buffer = stripped[len(closer) :]
                return True
        for marker in self._markers.all:
            if stripped.startswith(marker):
                return self._open_marked(marker, stripped)
        if any(literal.startswith(stripped) for literal in (*self._closers, *self._markers.all)):
            return False
        return self._go(self._text)
