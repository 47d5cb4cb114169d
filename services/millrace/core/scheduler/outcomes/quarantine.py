"""Keeps poison away from instances: requests on which instance after instance dies.

A request is poison once `MOST_DEATHS` instances in a row have died while they computed it, without
progress between the deaths: no further part of its prompt has landed at decode, or (`proxy`) no
further tokens were generated. Such a request is failed, and never placed again. So one request
can't kill a fleet, and a request that is next to it in a batch once goes on.

A silent or lost connection counts as the death of its instance, so a request that makes instances
hang is found, too."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from millrace.core.live_request import LiveRequest
from millrace.core.request import MOST_DEATHS
from millrace.core.scheduler.outcomes.admission import Refusal

#: Ids that are kept; the oldest goes first.
MOST_IDS: Final = 10_000


class Quarantine:
    """Counts deaths of requests before their first token, and remembers those that are poison."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def takes(self, request: LiveRequest, progress_tokens: int) -> bool:
        """Counts the death of an instance that computed the request; returns whether the request is
        poison.

        `progress_tokens`: that must have landed between two deaths, or both count.
        """
        request.count_death(progress_tokens)
        if request.deaths < MOST_DEATHS:
            return False
        self._ids[request.id] = None
        if len(self._ids) > MOST_IDS:
            self._ids.popitem(last=False)
        return True

    def refusal(self, request: LiveRequest) -> Refusal | None:
        """Returns why a submission is refused; None if it is not poison."""
        if request.id not in self._ids and request.deaths < MOST_DEATHS:
            return None
        why = f"{MOST_DEATHS} instances in a row died while they computed it"
        return Refusal(code="quarantined", message=why)
