"""The few errors that users and peers meet.

Each message says which field or value, and what to do.
"""

from __future__ import annotations

import re

_NUMBER = re.compile(r"^\[Errno -?\d+\] ")

#: How the last line of a process that ends with an error begins.
PREFIX = "millrace: "


class MillraceError(Exception):
    """Base of every error Millrace raises on purpose."""


class ConfigError(MillraceError):
    """A setting is out of range or contradicts another: names the field, value and range."""


class ModelError(MillraceError):
    """A model folder can't be served: missing, damaged or of an unknown architecture."""


class TransferError(MillraceError):
    """A KV transfer was refused, failed or missed its deadline. The request must not decode."""


class CapacityError(MillraceError):
    """A pool or a queue has no room. Callers wait, pick another place or answer 429."""


class IntegrityError(MillraceError):
    """`check_integrity()` found a leak or a double use: a defect in Millrace."""


def reason_of(error: Exception) -> str:
    """Returns why a call of the system failed, without its number and path; else the error's text.

    "No such file or directory", not "[Errno 2] No such file or directory: 'a.json'": the caller
    names the file and the option. Clients of HTTP put the system's text into errors of their own.
    """
    return getattr(error, "strerror", None) or _NUMBER.sub("", str(error))
