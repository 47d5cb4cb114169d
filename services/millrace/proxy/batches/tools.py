"""What the jobs of a process share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from millrace.core.backoff import Backoff
from millrace.core.config import BatchesConfig
from millrace.proxy.batches.lines import Answer, LineRequest
from millrace.proxy.files.store import Files
from millrace.proxy.metrics import BatchMetrics
from millrace.state.records import RecordStore

#: Answers a request: the endpoint's path, the request, the tenant.
Ask = Callable[[str, LineRequest, str], Awaitable[Answer]]

RETRY = Backoff(0.25, 30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What all jobs of a process share.

    `owner` names the process in leases; `clock` returns Unix time, s. `is_ready` tells whether a
    model's fleet takes requests. `check_model` raises ApiError for an unknown model. `slots` bounds
    the requests in flight. `retry`: the pauses before a request that the fleet refused is sent
    again.
    """

    records: RecordStore
    files: Files
    config: BatchesConfig
    owner: str
    clock: Callable[[], float]
    is_ready: Callable[[str], bool]
    check_model: Callable[[str], object]
    most_body_bytes: int
    slots: asyncio.Semaphore
    metrics: BatchMetrics
    retry: Backoff = RETRY
