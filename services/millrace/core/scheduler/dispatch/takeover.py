"""Takes over from a scheduler that is gone: gathers the reports of its peers, adopts the requests.

While a takeover is open, nothing is decided. Instances register with what they hold, proxies name
their open requests, and new requests wait. The end of the takeover adopts every request that its
proxy has named, and has instances drop what no proxy has named.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.incarnation import Incarnation
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler import events
from millrace.core.scheduler.dispatch.adoption import Adoption
from millrace.core.scheduler.fleet.instances import Instance
from millrace.core.scheduler.held import Held
from millrace.core.scheduler.ledger import Ledger
from millrace.core.scheduler.reports import RequestFinished, RequestReport
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext

Accept = Callable[[StepContext, LiveRequest], None]


class Takeover:
    """The reports of peers between `begin` and `end`."""

    def __init__(self, table: RequestTable, accept: Accept) -> None:
        """`accept` adds a new request to the table, unplaced."""
        self._table = table
        self._accept = accept
        self._adoption = Adoption(table)
        self.is_open = False
        self._ledgers: dict[str, Ledger] = {}  # by instance id
        self._reopened: dict[str, events.Reopened] = {}
        self._new: dict[str, events.Submitted] = {}
        self._finished: dict[str, set[Incarnation]] = {}  # where, by request id

    def begin(self) -> None:
        self.is_open = True

    # ---- while it is open

    def joined(self, step: StepContext, event: events.InstanceJoined) -> None:
        """Notes what an instance holds. Outside a takeover it has to drop it: the scheduler has
        given the requests up when the instance's earlier stream ended.
        """
        if self.is_open:
            self._ledgers[event.instance_id] = Ledger(event.held)
            return
        for part in event.held:
            self._adoption.let_go(step, event.instance_id, part)

    def left(self, instance: Instance) -> None:
        self._ledgers.pop(instance.id, None)

    def reported(self, instance: Instance, report: RequestReport) -> None:
        """Follows what the instance holds."""
        if (ledger := self._ledgers.get(instance.id)) is None:
            return
        complete = isinstance(report, RequestFinished) and report.reason in ("stop", "length")
        if complete and ledger.get(report.request_id) is not None:
            here = Incarnation(instance.id, instance.card.generation)
            self._finished.setdefault(report.request_id, set()).add(here)
        ledger.reported(report)

    def holder(self, request_id: str) -> str | None:
        """Returns the proxy that has named a request of this id; None if none has."""
        event = self._reopened.get(request_id) or self._new.get(request_id)
        return None if event is None else event.request.proxy_id

    def submitted(self, event: events.Submitted) -> None:
        """Lets a new request wait."""
        if event.request.id not in self._reopened:
            self._new.setdefault(event.request.id, event)

    def reopened(self, event: events.Reopened) -> None:
        """Notes an open request; a proxy that connects twice names it twice."""
        self._reopened[event.request.id] = event
        self._new.pop(event.request.id, None)

    def cancelled(self, request_id: str, proxy_id: str) -> None:
        """Forgets a request of a proxy, which does not want it any more."""
        for known in (self._reopened, self._new):
            event = known.get(request_id)
            if event is not None and event.request.proxy_id == proxy_id:
                del known[request_id]

    def proxy_left(self, proxy_id: str) -> None:
        """Forgets the requests of a proxy's connection."""
        known: list[events.Reopened | events.Submitted] = [*self._reopened.values()]
        for event in [*known, *self._new.values()]:
            self.cancelled(event.request.id, proxy_id)

    # ---- its end

    def end(self, step: StepContext) -> list[events.Submitted]:
        """Adopts the requests, oldest first; returns the new requests that waited."""
        self.is_open = False
        parts: dict[str, dict[str, Held]] = {}
        for instance_id, ledger in self._ledgers.items():
            for held in ledger.held():
                parts.setdefault(held.request_id, {})[instance_id] = held
        for event in sorted(self._reopened.values(), key=lambda one: one.request.arrival_s):
            self._adopt(step, event, parts.pop(event.request.id, {}))
        for of_request in parts.values():
            for instance_id, held in of_request.items():
                self._adoption.let_go(step, instance_id, held)
        waiting = list(self._new.values())
        self._ledgers, self._reopened, self._new, self._finished = {}, {}, {}, {}
        return waiting

    def _adopt(self, step: StepContext, event: events.Reopened, held: dict[str, Held]) -> None:
        request = LiveRequest(event.request)
        self._accept(step, request)
        # An earlier attempt may have ended where the proxy reads no tokens of it any more.
        if event.decode in self._finished.get(request.id, ()):
            for instance_id, part in held.items():
                self._adoption.let_go(step, instance_id, part)
            self._table.end(step, request, RequestState.FINISHED, None)
        else:
            self._adoption.adopt(step, request, event, held)

    def late(self, step: StepContext, event: events.Reopened) -> bool:
        """Takes a request that a proxy names outside a takeover; returns False if it is new.

        A known request continues on the proxy's new connection. An unknown one has ended with the
        connection before.
        """
        known = self._table.requests.get(event.request.id)
        if known is not None:
            self._table.reown(known, event.request.proxy_id)
        elif event.token_age_s is not None:
            request = LiveRequest(event.request)
            self._accept(step, request)
            self._table.fail(step, request, "its proxy's connection was lost", resumable=True)
        return known is not None or event.token_age_s is not None
