"""Reports of instances about the requests that they hold; `chunk_progress` has the chunks."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.request import TRANSITIONS, RequestState
from millrace.core.scheduler.dispatch.dispatcher import Dispatcher
from millrace.core.scheduler.dispatch.event_filter import EventFilter
from millrace.core.scheduler.fleet.instances import DecodeInstance, Instance, PrefillInstance
from millrace.core.scheduler.outcomes.breakers import ALL, TRANSFER
from millrace.core.scheduler.reports import (
    DecodeStarted,
    FirstTokenSent,
    PrefixLanded,
    PromptAdvanced,
    RequestFailed,
    RequestFinished,
    RequestReleased,
)
from millrace.core.scheduler.request_table import RequestTable, still_needs
from millrace.core.scheduler.step_context import StepContext

_COMPUTED = frozenset({RequestState.TRANSFERRING, RequestState.DECODING})


class RequestProgress:
    """Follows requests over their instances, from the first KV that lands to the last page freed.

    For a spread request the KV owner reports. Its KVP workers only report that they let go.
    """

    def __init__(
        self, table: RequestTable, dispatcher: Dispatcher, event_filter: EventFilter
    ) -> None:
        self._table = table
        self._dispatcher = dispatcher
        self._event_filter = event_filter

    def released(self, step: StepContext, instance: Instance, report: RequestReleased) -> None:
        if not self._event_filter.is_held(report.request_id, instance):
            return
        request = self._table.served(report.request_id, instance)
        if self._event_filter.frees_nothing(report, request, instance):
            return
        instance.release(report.request_id)
        if request is not None and _emitted_result(report, request, instance):
            self._table.breakers.proved(request, request.instance_ids, ALL)
            self._table.finish(step, request, None)
            self._dispatcher.run(step)
            return
        if request is not None and _did_its_part(report, request, instance):
            self._table.did_part(request, instance)
            self._dispatcher.run(step)
            return
        if request is not None and not _is_spared(request, instance):
            self._table.lost(step, request, instance, f"{instance.card.role} {instance.id} gave up")
            self._dispatcher.run(step)
        elif isinstance(instance, PrefillInstance) and self._drop_tasks(request):
            self._dispatcher.run(step)  # decode had its KV before prefill's report came
        else:
            self._dispatcher.room_made(step, instance)

    def _drop_tasks(self, request: LiveRequest | None) -> bool:
        return request is not None and self._table.drop_tasks(request)

    def prefix_landed(self, step: StepContext, instance: Instance, report: PrefixLanded) -> None:
        if not self._event_filter.is_held(report.request_id, instance):
            return
        request = self._table.served(report.request_id, instance)
        if request is not None and self._event_filter.is_of_earlier(report, request, instance):
            return
        tokens = min(report.tokens, request.prompt_tokens) if request is not None else 0
        if (
            request is None
            or instance.id != request.decode_id
            or request.state is RequestState.QUEUED
            or tokens <= request.landed_tokens
        ):
            self._event_filter.ignored += 1
            return
        request.land(tokens)
        step.record(request)

    def prompt_advanced(self, _: StepContext, instance: Instance, report: PromptAdvanced) -> None:
        request = self._table.served(report.request_id, instance)
        if (
            request is None
            or report.attempt != request.attempt
            or request.state is not RequestState.PREFILLING
            or instance.id not in _leaders(request)
        ):
            self._event_filter.ignored += 1
            return
        request.advance_prompt(report.tokens)

    def first_token_sent(
        self, step: StepContext, instance: Instance, report: FirstTokenSent
    ) -> None:
        """Takes decode's word that the prompt is computed, which may overtake prefill's."""
        request = self._table.served(report.request_id, instance)
        if request is not None and request.state is RequestState.PREFILLING:
            self._table.computed(step, request)
        else:
            self._event_filter.ignored += 1

    def decode_started(self, step: StepContext, instance: Instance, report: DecodeStarted) -> None:
        request = None
        if isinstance(instance, DecodeInstance):
            request = self._table.served(report.request_id, instance)
        if (
            request is None
            or instance.id != request.decode_id
            or RequestState.DECODING not in TRANSITIONS[request.state]
            or _never_computed(request)
        ):
            self._event_filter.ignored += 1
            return
        assert isinstance(instance, DecodeInstance)  # it serves the request
        instance.start(request.id)
        if request.state is RequestState.QUEUED:  # all had landed before the death of prefill
            self._table.unqueue(request)
        self._landed(request)
        request.start_decode(step.now_s - max(report.since_token_s, 0.0))
        instance.keep_pace(request)
        self._table.advance(step, request, RequestState.DECODING)
        self._table.learn_on_top(request)

    def _landed(self, request: LiveRequest) -> None:
        """Clears instances of errors: they computed the prompt, and its KV is at decode."""
        breakers, at_decode = self._table.breakers, request.kv_instance_ids
        breakers.proved(request, at_decode, TRANSFER)
        breakers.proved(request, set(request.instance_ids).difference(at_decode), ALL)

    def finished(self, step: StepContext, instance: Instance, report: RequestFinished) -> None:
        if not self._event_filter.is_held(report.request_id, instance):
            return
        if (
            not isinstance(instance, DecodeInstance)
            or instance.holdings[report.request_id].is_shard
        ):
            self._event_filter.ignored += 1
            return
        request = self._table.served(report.request_id, instance)
        instance.release(report.request_id)
        computing = report.request_id in self._table.run_queue_of  # prefill's report may be late
        if request is not None:
            if report.reason != "cancelled" and not _never_computed(request):
                if report.reason == "moved":  # it is migrated, as another request
                    # A KVP worker may hold no shard of it, and then it would report no release.
                    self._table.end(step, request, RequestState.CANCELLED, "it is migrated")
                else:
                    self._table.breakers.proved(request, request.kv_instance_ids, ALL)
                    self._table.finish(step, request, report.generated_tokens)
            else:
                self._table.lost(step, request, instance, f"decode {instance.id} gave up")
                computing = True
        if request is not None and computing:
            self._dispatcher.run(step)
        else:
            self._dispatcher.room_made(step, instance)

    def failed(self, step: StepContext, instance: Instance, report: RequestFailed) -> None:
        if not self._event_filter.is_held(report.request_id, instance):
            return
        request = self._table.served(report.request_id, instance)
        if request is not None and self._event_filter.is_of_earlier(report, request, instance):
            return
        if request is not None and still_needs(request, instance):
            opened = self._count_error(step, request, instance, report.fault)
            why = f"{instance.card.role} {instance.id}: {report.message}"
            kept = report.kept_tokens if instance.id == request.decode_id else 0
            if report.prompt_unread:  # no other instance can read it before it is written again
                self._table.fail(step, request, why, instance, resumable=True, prompt_unread=True)
            elif report.retryable:
                reached = request.reached_instance_ids
                self._table.lost(step, request, instance, why, kept)
                if request.counts and report.fault != "compute":
                    request.suspicion.broke(reached, step.now_s)
            else:
                self._table.fail(step, request, why, None if kept else instance)
            for one in opened:
                self._dispatcher.place_elsewhere(step, one)
        elif request is not None:
            self._table.drop_tasks(request)
        self._dispatcher.run(step)

    def _count_error(
        self, step: StepContext, request: LiveRequest, instance: Instance, fault: str
    ) -> list[Instance]:
        """Returns the instances whose breaker opened now."""
        if not fault:
            return []
        parties = {instance.id}
        if fault == "transfer":
            parties.update(request.reached_instance_ids)
        opened = self._table.breakers.failed(request, fault, parties, step.now_s)
        return [self._table.cluster.instances[one] for one in opened]


def _leaders(request: LiveRequest) -> tuple[str | None, ...]:
    """The instances that report of its prompt: the leader of its group, or a mixed instance."""
    return (request.chunks[-1].instance_ids[0],) if request.chunks else (request.decode_id,)


def _did_its_part(report: RequestReleased, request: LiveRequest, instance: Instance) -> bool:
    """Returns whether a member lets go of a request that other members still compute."""
    return (
        isinstance(instance, PrefillInstance)
        and report.complete
        and request.state is RequestState.PREFILLING
        and instance.id != request.chunks[0].instance_ids[0]
    )


def _emitted_result(report: RequestReleased, request: LiveRequest, instance: Instance) -> bool:
    """Returns whether the leader of a prefill-only request has sent the result to the proxy."""
    return (
        request.decode_id is None
        and report.complete
        and request.state is RequestState.TRANSFERRING
        and instance.id == request.chunks[0].instance_ids[0]
    )


def _is_spared(request: LiveRequest, instance: Instance) -> bool:
    """Returns whether the request needs the instance no more, which lets go of it by itself.

    A prefill instance has sent all of a computed prompt by then. The report of a KVP worker may
    overtake the KV owner's report, which tells whether the answer is complete.
    """
    return instance.id != request.decode_id and request.state in _COMPUTED


def _never_computed(request: LiveRequest) -> bool:
    """Returns whether decode can't have all of the prompt's KV: no attempt was begun."""
    return request.state is RequestState.QUEUED and not request.continues
