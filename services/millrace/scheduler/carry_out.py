"""Carries the machine's effects out: messages to peers, records, traces and metrics."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from millrace.core.request import RequestState, Shard
from millrace.core.scheduler import commands, effects, events
from millrace.core.scheduler.fleet.prompt_progress import progress_of
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.outcomes.admission import LEAST_RETRY_S
from millrace.scheduler.observe.first_tokens import FirstTokens
from millrace.scheduler.observe.metrics import SchedulerMetrics
from millrace.scheduler.observe.traces import SchedulerTraces
from millrace.scheduler.peers import Proxy, Worker
from millrace.scheduler.recorder import Recorder
from millrace.telemetry.metrics import Registry
from millrace.telemetry.tracing.tracer import NO_TRACER
from millrace.wire import fleet_messages as messages
from millrace.wire.codec.proxy import update_kind
from millrace.wire.codec.scheduler import command_kind

log = logging.getLogger(__name__)


class CarryOut:
    """Handles each kind of effect, for the peers that are connected. Keeps the specs of requests.

    `workers` and `proxies` are the loop's tables of peers.
    """

    def __init__(
        self,
        machine: Machine,
        workers: Mapping[str, Worker],
        proxies: Mapping[str, Proxy],
        metrics: SchedulerMetrics,
        recorder: Recorder,
        registry: Registry,
        clock: Callable[[], float],
    ) -> None:
        self._machine = machine
        self._workers = workers
        self._proxies = proxies
        self._metrics = metrics
        self._recorder = recorder
        self._clock = clock
        self._specs: dict[str, messages.EncodedSpec] = {}
        self._first_tokens = FirstTokens(registry)
        self.traces = SchedulerTraces(NO_TRACER)
        self.now_s = 0.0  # the time of the step whose effects are carried out
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            effects.Place: self._place,
            effects.Refuse: self._refuse,
            effects.Fail: self._fail,
            effects.Suspect: self._suspect,
            effects.AdmitDecode: self._admit,
            effects.RunPrefill: self._prefill,
            effects.Order: self._order,
            effects.CancelOn: self._cancel,
            effects.Record: self._record,
            effects.Stalled: self._stalled,
        }

    def note_spec(
        self, event: events.Submitted | events.Reopened, spec: messages.EncodedSpec
    ) -> bool:
        """Keeps the spec of a request that is new here; that of a known one must not change.

        Returns False for a new request whose id another proxy's request has. Its client has left
        that proxy, which will cancel its own; the new one is refused until then.
        """
        request, is_new = event.request, isinstance(event, events.Submitted)
        holder = self._machine.holder(request.id)
        if holder is None:
            self._keep_spec(event, spec)
        elif holder != request.proxy_id and is_new:
            self._refuse_twin(request.id, request.proxy_id, holder)
            return False
        elif holder != request.proxy_id and request.id not in self._machine.requests:
            self._refuse_twin(request.id, holder, request.proxy_id)  # its wait is over
            self._keep_spec(event, spec)
        return True

    def _keep_spec(
        self, event: events.Submitted | events.Reopened, spec: messages.EncodedSpec
    ) -> None:
        self._specs[event.request.id] = spec
        if not isinstance(event, events.Reopened) or event.token_age_s is None:
            self._first_tokens.submitted(event.request)

    def _refuse_twin(self, request_id: str, proxy_id: str, holder: str) -> None:
        refused = effects.Refuse(
            request_id=request_id,
            proxy_id=proxy_id,
            code="overloaded",
            message=f"the proxy {holder} still has a request of this id.",
            retry_after_s=LEAST_RETRY_S,
        )
        self._metrics.refused(refused)
        self.update(proxy_id, refused)

    def _place(self, effect: effects.Place) -> None:
        placed = messages.Placed(
            request_id=effect.request_id,
            decode=self._workers[effect.decode_id].member,
            predicted_ttft_s=effect.predicted_ttft_s,
        )
        self._first_tokens.placed(effect, self.now_s)
        self.update(effect.proxy_id, placed)

    def _refuse(self, effect: effects.Refuse) -> None:
        self._specs.pop(effect.request_id, None)
        self._first_tokens.refused(effect.request_id)
        self.traces.ended(effect.request_id, effect.message)
        self._metrics.refused(effect)
        self.update(effect.proxy_id, effect)

    def _fail(self, effect: effects.Fail) -> None:
        about = self.traces.about(effect.request_id)
        ended = "is quarantined" if effect.quarantined else "failed"
        log.warning("request %s %s: %s", effect.request_id, ended, effect.message, extra=about)
        self.traces.ended(effect.request_id, effect.message)
        self.update(effect.proxy_id, effect)

    def _suspect(self, effect: effects.Suspect) -> None:
        self.update(effect.proxy_id, effect)

    def _admit(self, effect: effects.AdmitDecode) -> None:
        command = messages.SendAdmitDecode(
            request=self._specs[effect.request_id],
            attempt=effect.attempt,
            kept_tokens=effect.kept_tokens,
            shards=self._shards(effect.shards),
            expected_tokens=effect.expected_tokens,
        )
        self.command(effect.instance_id, command)

    def keep_traces(self, wanted: commands.KeepTraces) -> None:
        """Exports the held spans of these traces, here and at all instances."""
        self.traces.keep(wanted.trace_ids)
        for instance_id in self._workers:
            self.command(instance_id, wanted)

    def _prefill(self, effect: effects.RunPrefill) -> None:
        self.traces.sent(effect)
        command = messages.SendRunPrefill(
            request=self._specs[effect.request_id],
            chunks=effect.chunks,
            decode=self._workers[effect.decode_id].member if effect.decode_id else None,
            attempt=effect.attempt,
            group=self._members(effect.chunks[-1].instance_ids),
            shards=self._shards(effect.shards),
        )
        self.command(effect.instance_id, command)

    def _shards(self, shards: Iterable[Shard]) -> tuple[commands.KvShard, ...]:
        return tuple(
            commands.KvShard(
                worker=self._workers[shard.worker_id].member,
                start_token=shard.start_token,
                end_token=shard.end_token,
            )
            for shard in shards
        )

    def _members(self, instance_ids: Iterable[str]) -> tuple[commands.Member, ...]:
        return tuple(self._workers[instance_id].member for instance_id in instance_ids)

    def _order(self, effect: effects.Order) -> None:
        self.command(effect.instance_id, effect)

    def _cancel(self, effect: effects.CancelOn) -> None:
        self.command(effect.instance_id, effect)

    def _stalled(self, effect: effects.Stalled) -> None:
        waits = "; ".join(f"{instance_id}: {what}" for instance_id, what in effect.waits)
        log.error(
            "prefill stood still: requests %s are planned again. Please report this defect. %s",
            ", ".join(effect.request_ids),
            waits,
        )

    def _record(self, effect: effects.Record) -> None:
        self._recorder.put(effect)
        if effect.state is RequestState.QUEUED:
            self.tell_if_queued(effect.request_id)
        self._first_tokens.recorded(effect, self.now_s)
        self.traces.recorded(effect)
        if effect.state.is_final:
            del self._specs[effect.request_id]
            self._metrics.ended(effect)

    def tell_if_queued(self, request_id: str) -> None:
        """Tells the proxy that no instance has room for a request yet."""
        request = self._machine.requests.get(request_id)
        if request is None or request.state is not RequestState.QUEUED:
            return
        if request.decode_id is None:
            self.update(request.proxy_id, messages.Queued(request_id=request_id))

    def send_progress(self, proxy: Proxy, request_ids: Iterable[str]) -> None:
        """Sends the progress of prompts, also of other proxies; leaves out ended requests."""
        machine = self._machine
        for request_id in request_ids:
            request = machine.requests.get(request_id)
            if request is not None:
                expected_s, place = self._first_tokens.expected_s(request_id), None
                if request.state in (RequestState.QUEUED, RequestState.PREFILLING):
                    place = machine.queue_place(request)
                if found := progress_of(request, self._clock(), expected_s, place):
                    self.update(proxy.key, messages.Progress(request_id=request_id, prompt=found))

    def update(self, key: str, update: messages.ProxyUpdate) -> None:
        if (proxy := self._proxies.get(key)) is not None:
            proxy.outbox.put(update)
            self._metrics.sent.labels(update_kind(update)).inc()

    def command(self, instance_id: str, command: messages.WorkerCommand) -> None:
        self._workers[instance_id].outbox.put(command)
        self._metrics.sent.labels(command_kind(command)).inc()
