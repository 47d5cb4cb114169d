"""Finds the requests that kill the instances that run them, and takes them out of the fleet.

An instance that is lost makes every request that was open there a suspect of the loss, unless the
request has got further there (`MIN_KEPT_TOKENS`). A suspect that has lost fewer than
`scheduler.max_deaths` instances goes on as any other request. After that many deaths

- a request that was the only one open at the last of them is quarantined: it fails, and is not
  tried again;
- any other suspect is isolated: it runs alone, one such request at a time, so that another death
  proves its fault and hurts no other request. When it has decoded alone for `isolation_s`, it is
  cleared of all deaths.

The deaths of a quarantined request are explained: no other request is suspected of them any more.

A loss looks the same at first whether the instance died or only its stream to the scheduler broke.
A stream that broke is no death: the same incarnation registers again. A later incarnation, the
silence of a whole lease (a request may have made the instance hang), and `lease_s` without a
registration are deaths. A suspect that its unresolved losses would bring to `max_deaths` is held
until they are resolved. The attempt that ends with a loss does not count towards `max_attempts`,
until `MOST_RETURNED` losses of the request have proved to be breaks: it probably breaks the
streams. A peer may notice the loss before the scheduler, and give the attempt up: a loss within
`lease_s` after that explains it, and the request was open there.

After the first token, a request goes on as a new request of its proxy, whose spec names the
losses (`Request.deaths`). Its proxy may see a loss before the scheduler: a named incarnation that
is still registered is an unresolved loss until it leaves, or for `lease_s`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.core.incarnation import Incarnation
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler.events import InstanceJoined
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance
from millrace.core.scheduler.request_table import RequestTable, still_needs
from millrace.core.scheduler.step_context import StepContext

#: So many losses of one request may prove to be breaks of a stream.
MOST_RETURNED: Final = 4

#: How long a loss is remembered, for requests that proxies submit again.
KEPT_S: Final = 60.0


@dataclass(slots=True, kw_only=True)
class _Loss:
    """The loss of one incarnation."""

    until_s: float  # it is resolved then, or forgotten if it has been
    gone: bool = False  # the scheduler has seen it leave; else only a proxy has lost it
    company: int = 0  # requests that were open there
    died: bool = False
    silent: bool = False  # until its lease lapsed
    explained: bool = False  # by a quarantined request


class Suspects:
    """The losses of the last minutes. The requests themselves know of which they are suspected."""

    def __init__(self, table: RequestTable) -> None:
        self.quarantined = 0  # requests so far
        self._table = table
        self._config = table.config
        self._losses: dict[Incarnation, _Loss] = {}

    @property
    def isolated(self) -> int:
        """Returns the requests that may only run alone."""
        return len(self._table.isolated)

    # ---- what happens to instances

    def left(self, step: StepContext, instance: Instance) -> None:
        """Suspects the requests that are open at an instance that leaves without a drain."""
        if instance.leaving:
            return
        incarnation = Incarnation(instance.id, instance.card.generation)
        broken = self._broken_by(instance, step.now_s)
        open_there = list(dict.fromkeys([*self._open_at(instance), *broken]))
        leaving = {name for name, one in instance.holdings.items() if one.leaving}
        company = len(leaving.union(one.id for one in open_there))
        if company or incarnation in self._losses:
            until_s = step.now_s + self._config.lease_s
            self._losses[incarnation] = _Loss(until_s=until_s, gone=True, company=company)
        for request in open_there:
            if isinstance(instance, PrefillInstance) and request.got_further:
                continue  # a request that makes progress kills nothing
            request.suspicion.suspect(incarnation)
            self._changed(step, request)
        for request in broken:
            if request.suspicion.returned < MOST_RETURNED:
                request.forgive_broken()

    def died(self, step: StepContext, incarnation: Incarnation, *, silent: bool = False) -> None:
        """Notes that a lost instance counts as dead. One that was `silent` does so for good."""
        loss = self._losses.get(incarnation)
        if loss is None or loss.died:
            return
        loss.died, loss.gone, loss.silent = True, True, silent
        loss.until_s = step.now_s + KEPT_S
        for request in self._suspected_of(incarnation):
            request.suspicion.confirm(incarnation)
            self._judge(step, request, alone=loss.company == 1)

    def registered(self, step: StepContext, event: InstanceJoined) -> None:
        """Takes back a loss of the same incarnation, and confirms those of earlier ones."""
        incarnation = Incarnation(event.instance_id, event.generation)
        for one in [one for one in self._losses if one.id == event.instance_id]:
            if one.generation < event.generation:
                self.died(step, one)
        loss = self._losses.get(incarnation)
        if loss is not None and not loss.silent:
            del self._losses[incarnation]
            self._clear(step, (incarnation,), returned=True)

    def check(self, step: StepContext) -> None:
        """Resolves the losses whose time is over, and clears requests that have run alone."""
        for incarnation, loss in list(self._losses.items()):
            if step.now_s < loss.until_s:
                continue
            if loss.gone and not loss.died:
                self.died(step, incarnation)
                continue
            del self._losses[incarnation]
            if not loss.gone:  # the instance is well: only its stream to a proxy broke
                self._clear(step, (incarnation,))
        for request in list(self._table.isolated.values()):
            since_s = step.now_s if request.token_out_s is None else request.token_out_s
            decodes = request.state is RequestState.DECODING
            if decodes and step.now_s - since_s >= self._config.isolation_s:
                request.suspicion.clear(request.suspicion.deaths)
                self._changed(step, request)

    # ---- requests

    def submitted(self, step: StepContext, request: LiveRequest) -> None:
        """Suspects a new request of the losses that its spec names, and judges it."""
        if request.spec.deaths:
            alone = self.adopted(step, request)
            self._judge(step, request, alone=alone)

    def forgive(self, request: LiveRequest) -> None:
        """Lets the attempt that ended with a lost instance not count."""
        if request.suspicion.returned < MOST_RETURNED:
            request.forgive_attempt()

    def adopted(self, step: StepContext, request: LiveRequest) -> bool:
        """Suspects a request of the losses that its spec names, and lets it run where it runs.
        Returns whether it was the only request that was open at the last of them.
        """
        alone = False
        for incarnation in request.spec.deaths:
            alone = False
            loss = self._losses.get(incarnation)
            if loss is None and self._table.cluster.current(*incarnation) is not None:
                loss = _Loss(until_s=step.now_s + self._config.lease_s)
                self._losses[incarnation] = loss
            if loss is not None and loss.explained:
                continue  # by the fault of another request
            request.suspicion.suspect(incarnation)
            if loss is None or loss.died:
                request.suspicion.confirm(incarnation)
                alone = loss is not None and loss.company == 1
        return alone

    def _open_at(self, instance: Instance) -> list[LiveRequest]:
        """Returns the requests that the instance computes or takes KV of. Those that wait there are
        none.
        """
        table, found = self._table, []
        waiting = table.waiting_at(instance)
        for request_id in instance.holdings:
            request = table.served(request_id, instance)
            if request is None or request.state is RequestState.QUEUED:
                continue
            is_open = not isinstance(instance, PrefillInstance) or still_needs(request, instance)
            if request.state is RequestState.PREFILLING:
                is_open = request_id not in waiting and (
                    isinstance(instance, PrefillInstance) or request.has_begun
                )
            if is_open:
                found.append(request)
        return found

    def _broken_by(self, instance: Instance, now_s: float) -> list[LiveRequest]:
        """Returns the requests whose last attempt was given up there; the loss explains why."""
        since_s = now_s - self._config.lease_s
        return [
            one
            for one in self._table.requests.values()
            if instance.id in one.suspicion.broken_at and one.suspicion.broken_s >= since_s
        ]

    def _suspected_of(self, incarnation: Incarnation) -> list[LiveRequest]:
        live = self._table.requests.values()
        return [one for one in live if incarnation in one.suspicion.all]

    def _clear(
        self, step: StepContext, incarnations: tuple[Incarnation, ...], *, returned: bool = False
    ) -> None:
        """Clears all requests of these losses."""
        for incarnation in incarnations:
            for request in self._suspected_of(incarnation):
                request.suspicion.clear((incarnation,), returned=returned)
                self._changed(step, request)

    def _changed(self, step: StepContext, request: LiveRequest) -> None:
        """Tells the proxy of what the request is suspected now, and judges it."""
        step.suspect(request)
        self._judge(step, request)

    def _judge(self, step: StepContext, request: LiveRequest, *, alone: bool = False) -> None:
        """Decides how a suspect may run from now on. `alone`: at the last death of its suspicion it
        was the only request that was open.
        """
        most = self._config.max_deaths
        deaths, losses = len(request.suspicion.deaths), len(request.suspicion.losses)
        if deaths >= most and alone:
            self._quarantine(step, request)
            return
        held = losses > 0 and deaths + losses >= most
        self._table.restrict(request, is_held=held, is_isolated=deaths >= most)

    def _quarantine(self, step: StepContext, request: LiveRequest) -> None:
        self.quarantined += 1
        deaths = request.suspicion.deaths
        names = ", ".join(one.id for one in deaths)
        message = (
            f"the request was open at instances when they died: {names}; at the last death no "
            "other request was open there. It is not tried again: scheduler.max_deaths is "
            f"{self._config.max_deaths}"
        )
        self._table.fail(step, request, message, quarantined=True)
        for incarnation in deaths:
            if (loss := self._losses.get(incarnation)) is not None:
                loss.explained = True
        self._clear(step, deaths)
