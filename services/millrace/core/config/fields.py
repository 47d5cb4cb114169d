"""How a section declares its fields: default, range and meaning."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

from millrace.core.errors import ConfigError


def within(low: float, high: float = math.inf) -> Callable[[Any], str | None]:
    """Returns a check that a number is in a range; the check returns the range if it is not."""

    def check(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
        if low <= value <= high:
            return None
        return f"at least {low:g}" if math.isinf(high) else f"between {low:g} and {high:g}"

    return check


def one_of(*choices: str) -> Callable[[Any], str | None]:
    """Returns a check that a text is one of `choices`; the check returns them if it is not."""

    def check(value: Any) -> str | None:  # noqa: ANN401
        return None if value in choices else "one of " + ", ".join(choices)

    return check


def setting(default: Any, check: Callable[[Any], str | None] | None = None, doc: str = "") -> Any:  # noqa: ANN401
    """Returns the dataclass field of a setting; `doc` is its meaning, for the reference."""
    return field(default=default, metadata={"check": check, "doc": doc})


class Section:
    """Checks every field of a section against its range when it is built."""

    def __post_init__(self) -> None:
        section = type(self).__name__.removesuffix("Config").lower()
        for f in dataclasses.fields(self):  # type: ignore[arg-type]  # every section is a dataclass
            check = f.metadata.get("check")
            value = getattr(self, f.name)
            if check is not None and (wanted := check(value)) is not None:
                raise ConfigError(f"{section}.{f.name} is {value!r}; it must be {wanted}")
