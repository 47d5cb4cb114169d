"""The hardware profiles that ship with Millrace, and the reader for other profiles.

`build.py` makes the shipped profiles from public measurements; README.md names the sources.
`cache.py` keeps the results of `millrace profile` on this machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path

from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError


@cache
def profile_names() -> tuple[str, ...]:
    """Returns the names of the shipped profiles, sorted."""
    files = resources.files(__name__).iterdir()
    return tuple(sorted(file.name[:-5] for file in files if file.name.endswith(".json")))


@cache
def load_profile(name_or_path: str) -> Profile:
    """Loads a shipped profile by name, or a profile from a file whose path ends in .json.

    Raises ConfigError for an unknown name, and for a file that can't be read or isn't a profile.
    """
    if name_or_path in profile_names():
        text = (resources.files(__name__) / f"{name_or_path}.json").read_text("utf-8")
    elif name_or_path.endswith(".json"):
        try:
            text = Path(name_or_path).read_text("utf-8")
        except OSError as error:
            raise ConfigError(f"profile {name_or_path}: {error.strerror}") from None
    else:
        shipped = ", ".join(profile_names())
        raise ConfigError(
            f"profile is {name_or_path!r}; it must be one of {shipped}, or the path of a .json file"
        )
    try:
        return Profile.from_json(json.loads(text))
    except (json.JSONDecodeError, ConfigError) as error:
        raise ConfigError(f"profile {name_or_path}: {error}") from None


def encode(fields: Mapping[str, object]) -> str:
    """Returns the text of a profile's file, one line per field."""
    lines = [
        f" {json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}"
        for key, value in fields.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"
