"""Finds how far a request is, at any replica: by its own requests, the store and the scheduler."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from millrace.core.request import RequestState
from millrace.core.request_spec import RequestSpec
from millrace.proxy.errors import unavailable
from millrace.proxy.fleet.prompts_ahead import PromptsAhead
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.models.models import Models
from millrace.proxy.streams.latest_records import LatestRecords
from millrace.state.store import RequestRecord, RequestStore, StoreError
from millrace.state.streams import StreamStore
from millrace.wire.codec.request_spec import decode_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReport:
    """How far a response is. `queue_place` counts from 1; `left_s` are the predicted seconds until
    the first token, `predicted_ttft_s` the same since the arrival. None: unknown, or over.
    """

    id: str
    state: str
    created: int  # Unix time, s
    prompt_tokens: int
    computed_tokens: int
    completion_tokens: int
    queue_place: int | None = None
    left_s: float | None = None
    predicted_ttft_s: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"object": "millrace.request", **asdict(self)}


class RequestStates:
    """Answers for the requests of one tenant."""

    def __init__(self, models: Models, store: RequestStore, streams: StreamStore) -> None:
        self._models = models
        self._store = store
        self._latest = LatestRecords(store, streams)

    async def find(self, response_id: str, tenant: str) -> RequestReport | None:
        """Returns None if the tenant has no such request, or no longer. Raises ApiError (503)."""
        if (gateway := self._models.gateway_of(response_id)) is not None:
            own = [r for r in gateway.of_response(response_id) if r.spec.tenant == tenant]
            if own:
                return await self._of_own(response_id, own, gateway.prompts)
        try:
            return await self._of_record(response_id, tenant)
        except StoreError as error:
            raise unavailable("The request store does not answer.") from error

    async def incarnation(self, response_id: str) -> str:
        """Returns the id under which the scheduler has the response's first request now, or had it
        last. Raises ApiError (503).
        """
        if (gateway := self._models.gateway_of(response_id)) is not None:
            [first, *_] = gateway.of_response(response_id)
            [latest, *_] = first.parts or [first]
            return latest.spec.request_id
        try:
            for name in (response_id, f"{response_id}-0"):
                if (record := await self._latest.find(name)) is not None:
                    return record.request_id
        except StoreError as error:
            raise unavailable("The request store does not answer.") from error
        return response_id

    async def _of_own(
        self, response_id: str, requests: list[ProxyRequest], prompts: PromptsAhead
    ) -> RequestReport:
        report = await prompts.report(requests)
        total = sum(one.prompt_tokens for one in requests)
        found = RequestReport(
            id=response_id,
            state="decoding",
            created=int(requests[0].spec.arrival_unix_s),
            prompt_tokens=total,
            computed_tokens=total,
            completion_tokens=sum(one.completion_tokens for one in requests),
        )
        if report is None:
            return found
        waiting = sum(r.spec.prompt_tokens for r in requests if not r.has_begun)
        fields = asdict(found) | report.to_dict()
        fields["prompt_tokens"] = total
        fields["computed_tokens"] = max(0, total - waiting) + report.computed_tokens
        return RequestReport(**fields)

    async def _of_record(self, response_id: str, tenant: str) -> RequestReport | None:
        """Reports a request of another replica, or a request that has ended."""
        record = await self._latest.find(response_id)
        if record is None:
            return None
        spec = decode_spec(record.spec)
        if spec.tenant != tenant:
            return None
        emitted = 0
        for choice in range(spec.sampling.n):
            emitted += len(await self._store.journal(record.request_id, choice))
        return await self._told(response_id, record, spec, emitted)

    async def _told(
        self, response_id: str, record: RequestRecord, spec: RequestSpec, emitted: int
    ) -> RequestReport:
        final = RequestState(record.state).is_final
        asked = None if final or emitted else await self._models.ask_progress(record.request_id)
        prompt = None if asked is None else asked.prompt
        original = spec.prompt_tokens - spec.resumed_tokens
        state = "decoding" if emitted and not final else record.state
        computed, left_s, place = record.kv_tokens, None, None
        if emitted or state == RequestState.FINISHED.value:
            computed = original
        if prompt is not None:
            state, computed = prompt.state.value, prompt.computed_tokens
            left_s, place = prompt.left_s, prompt.queue_place
        waited_s = max(0.0, time.time_ns() / 1e9 - spec.arrival_unix_s)  # two processes' clocks
        return RequestReport(
            id=response_id,
            state=state,
            created=int(spec.arrival_unix_s),
            prompt_tokens=original,
            computed_tokens=min(computed, original),
            completion_tokens=emitted,
            queue_place=place,
            left_s=left_s,
            predicted_ttft_s=None if left_s is None else waited_s + left_s,
        )
