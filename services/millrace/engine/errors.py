"""The end of an engine that is more than one process."""

from __future__ import annotations

from millrace.core.errors import MillraceError


class EngineDied(MillraceError):
    """A process of the engine fell, and the engine with it: nothing is computed any more."""
