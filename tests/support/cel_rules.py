"""Evaluates the rules of a CRD's schema as an API server does: the part of CEL that they use.

A rule becomes an expression of Python. Rules that compare with the object before (`oldSelf`) are
left out. The results are those of cel-python 0.5 for the chart's profiles and the tests' cases.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

RULES = "x-kubernetes-validations"

_MACRO = re.compile(r"(\[[^\]]*\]|[\w.]+)\.(filter|all|exists)\((\w+), ")
_HAS = re.compile(r"\bhas\(([^()]*)\)")
_WORDS = {"&&": " and ", "||": " or ", "true": "True", "false": "False"}


def refusals(schema: dict[str, Any], value: Any, path: str = "") -> list[str]:
    """Returns the messages of the broken rules, each after the path of its value.

    value: with its defaults.
    """
    return list(_refusals(schema, value, path))


def _refusals(schema: dict[str, Any], value: Any, path: str) -> Iterator[str]:
    for rule in schema.get(RULES, ()):
        if "oldSelf" not in rule["rule"] and not _program(rule["rule"])(_wrapped(value)):
            yield f"{path}: {rule['message']}"
    if isinstance(value, dict):
        for name, inner in value.items():
            field = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(field, dict):
                yield from _refusals(field, inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _refusals(schema.get("items", {}), inner, f"{path}[{index}]")


class _Text(str):
    def startsWith(self, text: str) -> bool:
        return self.startswith(text)

    def matches(self, pattern: str) -> bool:
        return re.search(pattern, self) is not None

    def size(self) -> int:
        return len(self)


class _List(list[Any]):
    def size(self) -> int:
        return len(self)


class _Object(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        return _wrapped(self[name])  # KeyError: no such field


_WRAPPERS: dict[type, Any] = {str: _Text, list: _List, dict: _Object}


def _wrapped(value: Any) -> Any:
    wrapper = _WRAPPERS.get(type(value))
    return value if wrapper is None else wrapper(value)


def _has(read: Callable[[], object]) -> bool:
    try:
        read()
    except KeyError:
        return False
    return True


_NAMES: dict[str, Any] = {
    "__builtins__": {},
    "has": _has,
    "double": float,
    "filter": lambda found, wanted: _List(one for one in found if wanted(_wrapped(one))),
    "all": lambda found, wanted: all(wanted(_wrapped(one)) for one in found),
    "exists": lambda found, wanted: any(wanted(_wrapped(one)) for one in found),
}


@cache
def _program(rule: str) -> Callable[[Any], bool]:
    code = compile(_python(rule), rule, "eval")
    return lambda value: bool(eval(code, {**_NAMES, "self": value}))


def _python(rule: str) -> str:
    while macro := _MACRO.search(rule):
        found, name, variable = macro.groups()
        end = _closing(rule, macro.end())
        body = rule[macro.end() : end]
        rule = f"{rule[: macro.start()]}{name}({found}, lambda {variable}: {body}){rule[end + 1 :]}"
    rule = _HAS.sub(r"has(lambda: \1)", rule)
    if " ? " in rule:  # of the whole rule
        condition, rest = rule.split(" ? ")
        one, other = rest.split(" : ")
        rule = f"({one}) if ({condition}) else ({other})"
    rule = re.sub(r"!(?!=)", " not ", rule)
    return re.sub("|".join(map(re.escape, _WORDS)), lambda word: _WORDS[word.group()], rule).strip()


def _closing(text: str, start: int) -> int:
    """Returns where the bracket closes that is open at `start`."""
    depth = 1
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if not depth:
            return place
    raise ValueError(text)
