"""The few errors that users and peers meet.

Each message says which field or value, and what to do.
"""

from __future__ import annotations


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
