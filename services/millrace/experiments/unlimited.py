"""The scheduler of the papers' experiments: nothing is refused or given up, all requests count."""

from __future__ import annotations

from typing import Any

from millrace.core.config import SchedulerConfig


def scheduler(**fields: Any) -> SchedulerConfig:  # noqa: ANN401 - a setting's own type
    """Returns settings without limits; `fields` are the others."""
    return SchedulerConfig(
        max_queue_requests=10**9,
        max_queue_s=1e9,
        request_timeout_s=1e9,
        release_timeout_s=1e9,
        **fields,
    )
