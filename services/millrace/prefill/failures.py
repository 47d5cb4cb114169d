"""Why a prefill failed, as the scheduler and the metrics name it."""

from __future__ import annotations

import logging

from millrace.core.errors import CapacityError, MillraceError, TransferError
from millrace.core.scheduler.reports import RequestFailed
from millrace.engine.errors import EngineDied
from millrace.instance.spans import of_request
from millrace.prefill.job import PrefillJob
from millrace.state.store import StoreError

log = logging.getLogger(__name__)


class ComputeError(MillraceError):
    """Raised when a prompt's computation fails and would fail at any instance."""


#: The errors that count against instances (`RequestFailed.fault`).
_FAULTS = ((TransferError, "transfer"), (ComputeError, "compute"), (EngineDied, "compute"))

#: The reasons that the metrics tell apart; every other error is one of "compute".
_LABELS = ((StoreError, "store"), (TransferError, "transfer"), (CapacityError, "capacity"))


def label_of(error: MillraceError) -> str:
    """Returns the reason's name in the metrics."""
    return next((name for kind, name in _LABELS if isinstance(error, kind)), "compute")


def failure_of(job: PrefillJob, error: MillraceError) -> RequestFailed:
    """Returns the report of a job's failure, which is sent at once; its release is reported when
    nothing is in flight any more.
    """
    log.warning("request %s: %s", job.request_id, error, extra=of_request(job.command.request))
    return RequestFailed(
        request_id=job.request_id,
        message=str(error),
        retryable=not isinstance(error, ComputeError),
        prompt_unread=isinstance(error, StoreError),
        fault=next((name for kind, name in _FAULTS if isinstance(error, kind)), ""),
    )
