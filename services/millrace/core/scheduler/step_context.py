"""The context of one `Machine.step`: the time of the step, and the effects that it has so far.

The machine makes one context per step and hands it to the event's handler, which hands it on. No
object keeps a context after its step.
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.effects import (
    AdmitDecode,
    CancelOn,
    Effect,
    Fail,
    Order,
    Place,
    Record,
    Refuse,
    RunPrefill,
    Stalled,
    Suspect,
)
from millrace.core.scheduler.outcomes.admission import Refusal


class StepContext:
    """Collects effects in the order in which drivers carry them out."""

    __slots__ = ("effects", "now_s")

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s
        self.effects: list[Effect] = []

    # ---- to proxies

    def refuse(self, request: LiveRequest, refusal: Refusal) -> None:
        """Tells the proxy that the request is not accepted."""
        self.effects.append(
            Refuse(
                request_id=request.id,
                proxy_id=request.proxy_id,
                code=refusal.code,
                message=refusal.message,
                retry_after_s=refusal.retry_after_s,
            )
        )

    def place(self, request: LiveRequest, decode_id: str, predicted_ttft_s: float) -> None:
        """Tells the proxy that the request is accepted, and which instance emits its tokens."""
        self.effects.append(
            Place(
                request_id=request.id,
                proxy_id=request.proxy_id,
                decode_id=decode_id,
                predicted_ttft_s=predicted_ttft_s,
            )
        )

    def fail(
        self,
        request: LiveRequest,
        message: str,
        *,
        resumable: bool,
        prompt_unread: bool,
        quarantined: bool,
    ) -> None:
        """Tells the proxy that the accepted request is over without its answer."""
        self.effects.append(
            Fail(
                request_id=request.id,
                proxy_id=request.proxy_id,
                message=message,
                resumable=resumable,
                prompt_unread=prompt_unread,
                quarantined=quarantined,
            )
        )

    def suspect(self, request: LiveRequest) -> None:
        """Tells the proxy which lost instances the request was open at."""
        deaths = request.suspicion.all
        suspect = Suspect(request_id=request.id, proxy_id=request.proxy_id, deaths=deaths)
        self.effects.append(suspect)

    # ---- to instances

    def admit(self, request: LiveRequest) -> None:
        """Has the decode instance reserve pages for the request's next attempt."""
        assert request.decode_id is not None  # only placed requests are attempted
        self.effects.append(
            AdmitDecode(
                instance_id=request.decode_id,
                request_id=request.id,
                attempt=request.attempt,
                kept_tokens=request.kept_tokens,
                shards=request.shards,
                expected_tokens=request.expected_tokens,
            )
        )

    def run_prefill(self, request: LiveRequest, instance_id: str) -> None:
        """Has the instance compute its part of these chunks."""
        assert request.decode_id is not None or request.prefill_only  # only placed ones are sent
        self.effects.append(
            RunPrefill(
                instance_id=instance_id,
                request_id=request.id,
                chunks=request.chunks,
                decode_id=request.decode_id or "",
                attempt=request.attempt,
                shards=request.shards,
            )
        )

    def order(self, orders: Iterable[Order]) -> None:
        """Has the instances replace their queues."""
        self.effects += orders

    def cancel(self, request_id: str, instance_id: str, reason: str) -> None:
        """Has the instance drop the request."""
        self.effects.append(CancelOn(instance_id=instance_id, request_id=request_id, reason=reason))

    # ---- to the driver

    def record(self, request: LiveRequest) -> None:
        """Writes the request's new state to the request store."""
        self.effects.append(
            Record(
                request_id=request.id,
                state=request.state,
                decode_id=request.decode_id,
                kv_tokens=request.landed_tokens,
            )
        )

    def stalled(self, request_ids: tuple[str, ...], waits: tuple[tuple[str, str], ...]) -> None:
        """Logs which prepared requests did not begin."""
        self.effects.append(Stalled(request_ids=request_ids, waits=waits))
