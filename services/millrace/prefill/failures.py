"""Why a prefill failed, as the scheduler and the metrics name it."""

from __future__ import annotations

import logging

from millrace.core.errors import CapacityError, MillraceError, TransferError
from millrace.core.scheduler.reports import RequestFailed
from millrace.instance.spans import of_request
from millrace.prefill.job import PrefillJob
from millrace.state.store import StoreError

log = logging.getLogger(__name__)


#: The reasons that are errors of instances.
_FAULTS = {"transfer": "transfer", "compute": "compute"}


class ComputeError(MillraceError):
    """Raised when a prompt's computation fails and would fail at any instance."""


def reason_of(error: MillraceError) -> str:
    """Returns the reason's name in the metrics."""
    reasons = ((StoreError, "store"), (TransferError, "transfer"), (CapacityError, "capacity"))
    return next((name for kind, name in reasons if isinstance(error, kind)), "compute")


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
        fault=_FAULTS.get(reason_of(error), ""),
    )
