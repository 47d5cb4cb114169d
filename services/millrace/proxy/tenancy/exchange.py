"""What the proxy keeps of one HTTP request beside its answer: sender, reservation, headers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.core.limits.rules import Charge
from millrace.proxy.tenancy.caller import Caller
from millrace.state.limits import AccountCharge


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a request holds at its accounts from its admission to its end."""

    lease: str
    accounts: Sequence[AccountCharge]

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Admission:
        """Makes it again at another replica, from what `dataclasses.asdict` gives."""
        accounts = [
            AccountCharge(**{**one, "charges": [Charge(**charge) for charge in one["charges"]]})
            for one in found["accounts"]
        ]
        return cls(lease=found["lease"], accounts=accounts)


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """One HTTP request. `headers` are added to its answer."""

    caller: Caller
    #: On the monotonic clock, s; `answered_at` is None before the answer begins.
    arrived_at: float
    answered_at: float | None = None
    #: The name of the model that answers; empty before it is chosen.
    model: str = ""
    #: 499 while no answer has begun: the status if the client leaves before.
    status: int = 499
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    #: The answer's `x-request-id`; empty before the answer begins.
    request_id: str = ""
    trace_id: str = ""  # of its spans; empty: none
    admission: Admission | None = None
    #: Whether `headers` has what the limits leave.
    shows_limits: bool = False
    prompt_tokens: int = 0
    generated_tokens: int = 0
