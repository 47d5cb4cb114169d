"""Decides: takes the wanted and the observed state, and returns the actions to do now.

Pure and level-triggered: all memory is in the objects' status, so the operator may be stopped and
started at any time. A second pass over the result of a first pass returns no actions.
"""

from __future__ import annotations

from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.reconcile.service import reconcile_service

__all__ = ["reconcile_pool", "reconcile_service"]
