"""Follows the requests of a machine to their ends: `OutcomeFollower.saw` gets every step.

Not from a paper. A live scheduler and the replay of a recording use it alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from millrace.core.live_request import LiveRequest
from millrace.core.report.outcome import Outcome
from millrace.core.request import RequestState
from millrace.core.scheduler.effects import Effect, Place, Record, Refuse
from millrace.core.scheduler.events import Event, Reported, Submitted, TakeoverEnded
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.outcomes.objectives import mean_tbt_s
from millrace.core.scheduler.reports import RequestFinished

Wanted = Callable[[float], bool]


class OutcomeFollower:
    """Notes what becomes of the requests of one machine."""

    def __init__(self, machine: Machine, zero_s: float, wanted: Wanted | None = None) -> None:
        """`zero_s`: outcomes count from this time of the machine's clock. `wanted` says by the time
        of the first step with it, counted so, whether a request is followed; None: all are.
        """
        self._machine = machine
        self._zero_s = zero_s
        self._wanted = wanted
        self._open: dict[str, LiveRequest] = {}
        self._models: dict[str, str] = {}  # of open requests

    def saw(self, event: Event, effects: Iterable[Effect], now_s: float) -> list[Outcome]:
        """Takes in one step of the machine, immediately after the step; returns what ended."""
        ended: list[Outcome] = []
        if isinstance(event, TakeoverEnded) and self._wanted is None:
            self._open.update(self._machine.requests)  # those of the leader before
        if isinstance(event, Submitted) and self._is_wanted(now_s):
            self._came(event, effects, now_s, ended)
        for effect in effects:
            if isinstance(effect, Place):
                self._placed(effect)
            elif isinstance(effect, Record):
                self._recorded(effect, event, now_s, ended)
        return ended

    def end(self, now_s: float) -> list[Outcome]:
        """Returns the requests that have not ended, as they are."""
        return [self._outcome(one, one.state.value, None, now_s) for one in self._open.values()]

    def _is_wanted(self, now_s: float) -> bool:
        return self._wanted is None or self._wanted(now_s - self._zero_s)

    def _came(
        self, event: Submitted, effects: Iterable[Effect], now_s: float, ended: list[Outcome]
    ) -> None:
        asked = event.request
        request = self._machine.requests.get(asked.id)
        if request is not None and request.spec is asked:
            self._open[asked.id] = request
        elif any(isinstance(one, Refuse) and one.request_id == asked.id for one in effects):
            ended.append(self._outcome(LiveRequest(asked), "refused", None, now_s))

    def _placed(self, effect: Place) -> None:
        owner = self._machine.cluster.instances.get(effect.decode_id)
        if owner is not None and effect.request_id in self._open:
            self._models[effect.request_id] = owner.card.model_hash

    def _recorded(self, effect: Record, event: Event, now_s: float, ended: list[Outcome]) -> None:
        if not effect.state.is_final:
            return
        request = self._open.pop(effect.request_id, None)
        if request is not None:
            met_all = _met_all(request, event, now_s)
            ended.append(self._outcome(request, effect.state.value, met_all, now_s))
            self._models.pop(request.id, None)

    def _outcome(
        self, request: LiveRequest, state: str, met_all: bool | None, now_s: float
    ) -> Outcome:
        first_s = request.first_token_s
        refused = state == "refused"
        found = Outcome(
            request_id=request.id,
            slo_class=request.slo.class_name,
            tenant=request.tenant,
            model=self._models.get(request.id, ""),
            prompt_tokens=request.prompt_tokens,
            arrived_s=request.arrival_s - self._zero_s,
            state=state,
            ttft_s=None if first_s is None else first_s - request.arrival_s,
            objective_s=request.slo.ttft_s if refused else request.allowed_ttft_s,
            late_s=now_s - request.arrival_s,
            met_all=met_all,
        )
        return found if found.in_time is not False else self._explained(found, now_s)

    def _explained(self, late: Outcome, now_s: float) -> Outcome:
        """Adds to a late request why it was late."""
        why = self._machine.explain(late.request_id, now_s)
        if why is None:
            return late
        helps = why.helps[0] if why.helps else None
        return replace(
            late,
            waited=why.waited,
            suspended_by=why.suspended_by,
            helps="" if helps is None else f"{helps.what}: {helps.saves_s:.3g} s",
        )


def _met_all(request: LiveRequest, event: Event, now_s: float) -> bool | None:
    """Whether a request that `event` ended met all its objectives; None without any, and of one
    that was cancelled.
    """
    slo = request.slo
    if slo.ttft_s is None and slo.tbt_s is None and slo.e2e_s is None:
        return None
    if request.state is RequestState.FAILED:
        return False
    report = event.report if isinstance(event, Reported) else None
    if not isinstance(report, RequestFinished) or request.first_token_s is None:
        return None
    ttft_s, e2e_s = request.first_token_s - request.arrival_s, now_s - request.arrival_s
    tbt_s = mean_tbt_s(request, report.generated_tokens, now_s) or 0.0
    taken = ((ttft_s, slo.ttft_s), (tbt_s, slo.tbt_s), (e2e_s, slo.e2e_s))
    return all(allowed_s is None or seconds <= allowed_s for seconds, allowed_s in taken)
