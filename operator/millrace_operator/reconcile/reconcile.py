"""The operator's decisions: what is wanted and what was observed in, what to do now out.

Pure and level-triggered: nothing is remembered but in the objects' status, so that an operator may
be stopped and started anywhere. A pass over what the pass before brought about asks for nothing.
"""

from __future__ import annotations

from millrace_operator.reconcile.pool import reconcile_pool
from millrace_operator.reconcile.service import reconcile_service

__all__ = ["reconcile_pool", "reconcile_service"]
