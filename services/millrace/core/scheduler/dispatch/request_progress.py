"""What instances say of the requests that they hold, but for what they compute (`computing`)."""

from __future__ import annotations

from millrace.core.request import TRANSITIONS, Request, RequestState
from millrace.core.scheduler import events
from millrace.core.scheduler.dispatch.dispatcher import Rounds
from millrace.core.scheduler.event_filter import Speakers
from millrace.core.scheduler.fleet.instances import DecodeInstance, Instance, PrefillInstance
from millrace.core.scheduler.request_table import Lifecycle, still_needs

_COMPUTED = frozenset({RequestState.TRANSFERRING, RequestState.DECODING})


class Reports:
    """Follows requests over their instances, from the first KV that lands to the last page freed.

    Of a request that is spread the home speaks; its holders only say that they let go.
    """

    def __init__(self, life: Lifecycle, rounds: Rounds, speakers: Speakers) -> None:
        self._life = life
        self._rounds = rounds
        self._speakers = speakers

    def released(self, event: events.RequestReleased) -> None:
        instance = self._speakers.holder(event)
        if instance is None:
            return
        request = self._life.served(event.request_id, instance)
        if request is not None and self._speakers.is_of_earlier(event, request, instance):
            return
        instance.release(event.request_id)
        if request is not None and _did_its_part(event, request, instance):
            self._life.did_part(request, instance)
            self._rounds.run()
            return
        if request is not None and not _is_spared(request, instance):
            self._life.lost(request, instance, f"{instance.card.role} {instance.id} gave up")
            self._rounds.run()
        elif isinstance(instance, PrefillInstance) and self._drop_tasks(request):
            self._rounds.run()  # decode had its cache before prefill said that it was done
        else:
            self._rounds.room_made(instance)

    def _drop_tasks(self, request: Request | None) -> bool:
        return request is not None and self._life.drop_tasks(request)

    def prefix_landed(self, event: events.PrefixLanded) -> None:
        instance = self._speakers.holder(event)
        if instance is None:
            return
        request = self._life.served(event.request_id, instance)
        if request is not None and self._speakers.is_of_earlier(event, request, instance):
            return
        tokens = min(event.tokens, request.prompt_tokens) if request is not None else 0
        if (
            request is None
            or instance.id != request.decode_id
            or request.state is RequestState.QUEUED
            or tokens <= request.landed_tokens
        ):
            self._speakers.ignored += 1
            return
        request.landed_tokens = tokens
        self._life.record(request)

    def decode_started(self, event: events.DecodeStarted) -> None:
        instance = self._speakers.current(event)
        request = None
        if isinstance(instance, DecodeInstance):
            request = self._life.served(event.request_id, instance)
        if (
            request is None
            or event.instance_id != request.decode_id
            or RequestState.DECODING not in TRANSITIONS[request.state]
            or _never_computed(request)
        ):
            self._speakers.ignored += instance is not None
            return
        assert isinstance(instance, DecodeInstance)  # or it would serve no request here
        instance.start(request.id)
        if request.state is RequestState.QUEUED:  # all had landed before the death of prefill
            self._life.unqueue(request)
        request.landed_tokens = request.prompt_tokens
        request.token_out_s = self._life.now_s - max(event.since_token_s, 0.0)
        self._life.advance(request, RequestState.DECODING)
        self._life.learn_on_top(request)

    def finished(self, event: events.RequestFinished) -> None:
        instance = self._speakers.holder(event)
        if not isinstance(instance, DecodeInstance) or instance.holdings[event.request_id].is_shard:
            self._speakers.ignored += instance is not None
            return
        request = self._life.served(event.request_id, instance)
        instance.release(event.request_id)
        computing = event.request_id in self._life.board_of  # prefill's news may be late
        if request is not None:
            if event.reason != "cancelled" and not _never_computed(request):
                self._life.end(request, RequestState.FINISHED, None)
            else:
                self._life.lost(request, instance, f"decode {instance.id} gave up")
                computing = True
        if request is not None and computing:
            self._rounds.run()
        else:
            self._rounds.room_made(instance)

    def failed(self, event: events.RequestFailed) -> None:
        instance = self._speakers.holder(event)
        if instance is None:
            return
        request = self._life.served(event.request_id, instance)
        if request is not None and self._speakers.is_of_earlier(event, request, instance):
            return
        if request is not None and still_needs(request, instance):
            why = f"{instance.card.role} {instance.id}: {event.message}"
            kept = event.kept_tokens if instance.id == request.decode_id else 0
            if event.retryable:
                self._life.lost(request, instance, why, kept)
            else:
                self._life.fail(request, why, None if kept else instance)
        elif request is not None:
            self._life.drop_tasks(request)
        self._rounds.run()


def _did_its_part(event: events.RequestReleased, request: Request, instance: Instance) -> bool:
    """Whether a member lets go of a request that others of its group still compute."""
    return (
        isinstance(instance, PrefillInstance)
        and event.complete
        and request.state is RequestState.PREFILLING
        and instance.id != request.chunks[0].instance_ids[0]
    )


def _is_spared(request: Request, instance: Instance) -> bool:
    """Whether the request goes on without the instance, which lets go of it by itself.

    A prefill instance has sent all of a computed prompt by then. A holder's word may overtake the
    home's, which says whether the answer is complete or goes on elsewhere.
    """
    return instance.id != request.decode_id and request.state in _COMPUTED


def _never_computed(request: Request) -> bool:
    """Whether decode can't have all of the prompt's KV: no attempt was begun."""
    return request.state is RequestState.QUEUED and not request.goes_on
