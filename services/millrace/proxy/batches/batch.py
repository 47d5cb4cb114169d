"""A batch of /v1/batches: its state, its progress, and the rules by which both change.

Pure: time is an argument, and every change makes a new batch. `TRANSITIONS` has all moves between
states. Results are added by `recorded`, together with the place up to which the input is done: both
are in one record, so a result is in the output if and only if its line is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import orjson

from millrace.proxy.files.objects import Part

Json = dict[str, Any]

#: The states that may follow each state. Final states have none.
TRANSITIONS: dict[str, frozenset[str]] = {
    "validating": frozenset({"in_progress", "failed", "cancelling"}),
    "in_progress": frozenset({"finalizing", "failed", "expired", "cancelling"}),
    "finalizing": frozenset({"completed"}),
    "cancelling": frozenset({"cancelled"}),
    "completed": frozenset(),
    "failed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}
#: The fields with the time at which a batch entered a state.
_TIMED = (
    "in_progress",
    "finalizing",
    "completed",
    "failed",
    "expired",
    "cancelling",
    "cancelled",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of the answers so far."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            reasoning_tokens=self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """How far the input is done: all lines before number `line` (from 1), which begins at byte
    `offset`, and the lines `ahead`, ascending, which are done although an earlier line is not.
    """

    line: int = 1
    offset: int = 0
    ahead: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One version of a batch. Times are Unix, s."""

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: Json | None
    created_at: int
    expires_at: int
    output_ttl_s: float
    model: str | None = None
    status: str = "validating"
    times: dict[str, int] = field(default_factory=dict)
    errors: Sequence[Json] = ()
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: Usage = field(default_factory=Usage)
    place: Place = field(default_factory=Place)
    outputs: Sequence[Part] = ()
    refusals: Sequence[Part] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def final(self) -> bool:
        return not TRANSITIONS[self.status]

    def document(self) -> Json:
        """Returns OpenAI's object `batch`."""
        usage = self.usage
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "model": self.model,
            "errors": {"object": "list", "data": list(self.errors)} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{state}_at": self.times.get(state) for state in _TIMED},
            "request_counts": {
                "total": self.total,
                "completed": self.completed,
                "failed": self.failed,
            },
            "usage": {
                "input_tokens": usage.input_tokens,
                "input_tokens_details": {"cached_tokens": usage.cached_tokens},
                "output_tokens": usage.output_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
                "total_tokens": usage.input_tokens + usage.output_tokens,
            },
            "metadata": self.metadata,
        }

    def encoded(self) -> bytes:
        """Returns the record's body."""
        return orjson.dumps(asdict(self))

    # -- changes

    def moved(self, status: str, now_s: float) -> Batch:
        """Returns the batch in another state. Raises ValueError if the state can't follow."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"a batch that is {self.status} can't become {status}")
        return replace(self, status=status, times={**self.times, status: int(now_s)})

    def checked(self, total: int, model: str | None, now_s: float) -> Batch:
        """Returns the batch in progress: its input has `total` valid lines."""
        return replace(self.moved("in_progress", now_s), total=total, model=model)

    def refused(self, errors: Sequence[Json], now_s: float) -> Batch:
        """Returns the failed batch: its input can't be run."""
        return replace(self.moved("failed", now_s), errors=errors)

    def recorded(
        self,
        place: Place,
        *,
        outputs: Sequence[Part],
        refusals: Sequence[Part],
        completed: int,
        failed: int,
        usage: Usage,
    ) -> Batch:
        """Returns the batch with all parts so far, and results counted in addition."""
        return replace(
            self,
            place=place,
            outputs=outputs,
            refusals=refusals,
            completed=self.completed + completed,
            failed=self.failed + failed,
            usage=self.usage + usage,
        )


def decode_batch(body: bytes) -> Batch:
    """Returns the batch of a record's body."""
    fields: Json = orjson.loads(body)
    return Batch(
        **fields
        | {
            "usage": Usage(**fields["usage"]),
            "place": Place(**fields["place"]),
            "outputs": [Part(**part) for part in fields["outputs"]],
            "refusals": [Part(**part) for part in fields["refusals"]],
        }
    )
