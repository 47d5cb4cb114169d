"""What became of one request: the rows of `millrace report`.

A first token counts as in time as the scheduler's metric counts it: a request that failed before
its first token has missed its objective; one that was refused, or cancelled before its first token,
counts as neither.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Final

from millrace.core.scheduler.explanation.explain import Waited

_ENCODER: Final = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one request. Times in seconds; None: not known, or no objective."""

    request_id: str
    slo_class: str
    tenant: str
    model: str  # hash of the model; empty: it had no place
    prompt_tokens: int
    arrived_s: float  # after the run's begin, or Unix time
    state: str  # its last; "refused" if it was not accepted
    ttft_s: float | None = None
    objective_s: float | None = None  # of its first token
    late_s: float | None = None  # so far, of a request without a first token
    met_all: bool | None = None  # its objectives of TTFT, TBT and end to end
    waited: tuple[Waited, ...] = ()
    suspended_by: tuple[str, ...] = ()
    helps: str = ""  # what would have helped most

    @property
    def in_time(self) -> bool | None:
        """Whether its first token was in time; None: it counts as neither."""
        if self.objective_s is None:
            return None
        if self.ttft_s is not None:
            return self.ttft_s <= self.objective_s
        return False if self.state == "failed" or self.lateness > 1.0 else None

    @property
    def lateness(self) -> float:
        """Its time to the first token, so far, over the objective; 0 where nothing counts."""
        seconds = self.ttft_s if self.ttft_s is not None else self.late_s
        if not self.objective_s or seconds is None or self.state in ("refused", "cancelled"):
            return 0.0
        return seconds / self.objective_s

    def encoded(self) -> bytes:
        """Returns what `decode_outcome` reads."""
        # Not by `asdict` as a whole, which copies every field.
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["waited"] = [asdict(one) for one in self.waited]
        return _ENCODER.encode(fields).encode()


def decode_outcome(text: bytes) -> Outcome:
    """Raises ValueError, KeyError or TypeError for a text of another shape."""
    fields = json.loads(text)
    waited = tuple(Waited(**one) for one in fields.pop("waited"))
    return Outcome(**fields | {"waited": waited, "suspended_by": tuple(fields["suspended_by"])})
