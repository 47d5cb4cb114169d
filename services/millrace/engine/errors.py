"""The error with which an engine of several processes ends."""

from __future__ import annotations

from millrace.core.errors import MillraceError


class EngineDied(MillraceError):
    """A process of the engine has died. The engine computes nothing any more."""
