"""Every setting has an effect: code outside of the configuration itself reads it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.core.config import Config, settings

ROOT = Path(__file__).parents[3]
OWN = ("services/millrace/core/config/", "services/millrace/cli/commands/config.py")
#: Other names of a section in the code. Attributes of other things do not count.
CALLED = {"config", "c", "settings", "tree"}

SECTIONS = {
    name: cls
    for name, cls in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(cls)
}


def reads(text: str) -> set[tuple[str, str]]:
    """Returns (name that an attribute is read of, attribute), of a source text."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of = node.value
            base = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
            found.add((base.strip("_"), node.attr))
    return found


@pytest.fixture(scope="module")
def found() -> set[tuple[str, str]]:
    """Returns the reads of all code but the configuration's."""
    paths = [
        path
        for root in ("services", "operator", "kernels")
        for path in (ROOT / root).rglob("*.py")
        if not path.relative_to(ROOT).as_posix().startswith(OWN) and "pb" not in path.parts
    ]
    return set().union(*(reads(path.read_text()) for path in paths))


def attributes_of(cls: type, name: str) -> Iterator[str]:
    """Returns the field, and the properties of its section that read it."""
    yield name
    for attribute, value in vars(cls).items():
        if isinstance(value, property):
            getter = textwrap.dedent(inspect.getsource(value.fget))
            if ("self", name) in reads(getter):
                yield attribute


def is_read(found: set[tuple[str, str]], section: str, name: str) -> bool:
    return any(
        (called, attribute) in found
        for attribute in attributes_of(SECTIONS[section], name)
        for called in (section, *CALLED)
    )


def test_every_setting_is_read(found) -> None:
    unread = [
        f"{one.section}.{one.name}"
        for one in settings()
        if not is_read(found, one.section, one.name)
    ]
    assert not unread


def test_a_setting_that_nobody_reads_is_found(found) -> None:
    """`transfer.transport.base` was such a setting: only other objects' attributes had that
    name."""
    assert not is_read(found, "transfer", "transport")
    assert ("context", "transport") in found
