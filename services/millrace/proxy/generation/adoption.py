"""A request that this replica of the proxy continues, and another replica has begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True, kw_only=True)
class Adoption:
    """What is known of the request before its adoption. Times are the event loop's clock, in s.

    `tokens` were known at the adoption. `former` is the timeline of the replica that had the
    request before, packed (`proxy.tracing.timeline`); None: the store does not have it.
    """

    at: float
    tokens: int
    former: Sequence[Any] | None = None
    #: Of the first token that this replica has got from an instance; None before that.
    first_token_at: float | None = None

    def take_token(self, now: float) -> None:
        """Notes that a token has come from an instance."""
        if self.first_token_at is None:
            self.first_token_at = now
