"""Short ways to build the core's events and to read its effects."""

from __future__ import annotations

from typing import TypeVar

from millrace.core.config import SchedulerConfig
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Request, Slo
from millrace.core.scheduler import effects, events, reports
from millrace.core.scheduler.machine import Machine

E = TypeVar("E")


def instance(
    instance_id: str,
    *,
    generation: int = 1,
    pages: int = 100,
    page_tokens: int = 16,
    context: int = 4096,
    batch: int = 64,
    model: str = "h",
    seconds_a_token: float = 1e-3,
    latency: SpLatency | None = None,
    node: str = "",
    kv_layers: int = 0,
    decode_step: DecodeStepTime | None = None,
    block_tokens: int = 0,
    adaptive_chunks: bool = False,
) -> events.InstanceJoined:
    """Instance "p..." prefills, "m..." does both, "k..." holds shards, any other decodes."""
    return events.InstanceJoined(
        instance_id=instance_id,
        generation=generation,
        role={"p": "prefill", "m": "mixed", "k": "kvp"}.get(instance_id[0], "decode"),
        kv_pages=pages,
        page_tokens=page_tokens,
        max_context_tokens=context,
        max_batch=batch,
        model_hash=model,
        latency=latency or SpLatency(by_sp={1: Latency(b=seconds_a_token)}),
        node=node,
        kv_layers=kv_layers,
        decode_step=decode_step,
        block_tokens=block_tokens,
        adaptive_chunks=adaptive_chunks,
    )


def groups_of(*degrees: int, seconds_a_token: float = 1e-3) -> SpLatency:
    """Makes a group of n n times as fast: times of chunks are easy to compute by hand."""
    return SpLatency(by_sp={sp: Latency(b=seconds_a_token / sp) for sp in degrees})


def request(
    request_id: str,
    prompt: int = 100,
    new: int = 28,
    *,
    choices: int = 1,
    proxy: str = "x",
    arrival_s: float = 0.0,
    ttft_s: float | None = None,
    tbt_s: float | None = None,
    e2e_s: float | None = None,
    slo_class: str = "default",
    prefix: tuple[int, ...] = (),
    resumable: bool = True,
    deaths: str = "",
) -> events.Submitted:
    """`deaths`: lost incarnations that the proxy names, as `d0@1,d1@1`."""
    lost = [one.partition("@") for one in deaths.split(",") if one]
    return events.Submitted(
        request=Request(
            id=request_id,
            proxy_id=proxy,
            prompt_tokens=prompt,
            max_new_tokens=new,
            choices=choices,
            arrival_s=arrival_s,
            slo=Slo(ttft_s=ttft_s, tbt_s=tbt_s, e2e_s=e2e_s, class_name=slo_class),
            prefix_hashes=prefix,
            resumable=resumable,
            deaths=tuple(Incarnation(name, int(generation)) for name, _, generation in lost),
        )
    )


def reported(instance_id: str, report: reports.Report, generation: int = 1) -> events.Reported:
    return events.Reported(instance_id=instance_id, generation=generation, report=report)


def kind_of(event: events.Event) -> str:
    """Returns the name of the event's type, or of the report's type."""
    return type(event.report if isinstance(event, events.Reported) else event).__name__


class Bench:
    """Steps a machine, keeps all effects, and checks the machine after every step."""

    def __init__(self, *fleet: events.InstanceJoined, config: SchedulerConfig | None = None):
        self.machine = Machine(config or SchedulerConfig())
        self.now_s = 0.0
        self.all: list[effects.Effect] = []
        for card in fleet:
            self.step(card)

    def step(self, event: events.Event) -> list[effects.Effect]:
        found = self.machine.step(event, self.now_s)
        self.machine.check_integrity()
        self.all += found
        return found

    def report(self, instance_id: str, report: reports.Report) -> list[effects.Effect]:
        return self.step(reported(instance_id, report))

    def submit(self, *args, **kwargs) -> list[effects.Effect]:
        return self.step(request(*args, arrival_s=self.now_s, **kwargs))

    def chunk_started(
        self, instance_id: str, request_id: str, index: int = 0
    ) -> list[effects.Effect]:
        return self.report(
            instance_id, reports.ChunkStarted(request_id=request_id, chunk_index=index)
        )

    def suspended(
        self, instance_id: str, request_id: str, compute_s: float, index: int = 0
    ) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.ChunkSuspended(request_id=request_id, chunk_index=index, compute_s=compute_s),
        )

    def computed(
        self,
        instance_id: str,
        request_id: str,
        index: int = 0,
        *,
        last: bool = True,
        compute_s: float = 0.0,  # 0: nothing is learned from it
    ) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.ChunkFinished(
                request_id=request_id, chunk_index=index, compute_s=compute_s, last=last
            ),
        )

    def released(
        self,
        instance_id: str,
        request_id: str,
        *,
        complete: bool = False,
        attempt: int | None = None,
    ) -> list[effects.Effect]:
        """Without an `attempt` decode names the last one that it was told of, unless it answers for
        a shard; prefill names none.
        """
        if attempt is None:
            attempt = self._told(instance_id, request_id)
        return self.report(
            instance_id,
            reports.RequestReleased(request_id=request_id, complete=complete, attempt=attempt),
        )

    def _told(self, instance_id: str, request_id: str) -> int:
        key = instance_id, request_id
        admitted = (one for one in reversed(self.all) if isinstance(one, effects.AdmitDecode))
        return next((a.attempt for a in admitted if (a.instance_id, a.request_id) == key), 0)

    def landed(self, request_id: str, tokens: int, attempt: int = 1) -> list[effects.Effect]:
        """Decode instance "d0" has the KV of the first tokens."""
        return self.report(
            "d0", reports.PrefixLanded(request_id=request_id, attempt=attempt, tokens=tokens)
        )

    def advanced(
        self, instance_id: str, request_id: str, tokens: int, attempt: int = 1
    ) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.PromptAdvanced(request_id=request_id, attempt=attempt, tokens=tokens),
        )

    def decoding(
        self, instance_id: str, request_id: str, since_token_s: float = 0.0
    ) -> list[effects.Effect]:
        return self.report(
            instance_id, reports.DecodeStarted(request_id=request_id, since_token_s=since_token_s)
        )

    def finished(
        self, instance_id: str, request_id: str, reason: str = "stop", tokens: int = 5
    ) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.RequestFinished(request_id=request_id, reason=reason, generated_tokens=tokens),
        )

    def failed(
        self,
        instance_id: str,
        request_id: str,
        *,
        retryable: bool = True,
        attempt: int = 0,
        kept_tokens: int = 0,
        prompt_unread: bool = False,
        fault: str = "",
    ) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.RequestFailed(
                request_id=request_id,
                message="out of luck",
                retryable=retryable,
                attempt=attempt,
                kept_tokens=kept_tokens,
                prompt_unread=prompt_unread,
                fault=fault,
            ),
        )

    def died(
        self, instance_id: str, generation: int = 1, *, silent: bool = False
    ) -> list[effects.Effect]:
        return self.step(
            events.InstanceLeft(instance_id=instance_id, generation=generation, silent=silent)
        )

    def drains(self, instance_id: str) -> list[effects.Effect]:
        return self.report(instance_id, reports.Draining())

    def heartbeat(self, instance_id: str, free_pages: int = 100, **fields) -> list[effects.Effect]:
        return self.report(
            instance_id,
            reports.Heartbeat(free_pages=free_pages, **{"running": 1, "waiting": 0, **fields}),
        )

    def cordon(
        self, instance_id: str, cordoned: bool = True, *, generation: int = 1
    ) -> list[effects.Effect]:
        return self.step(
            events.InstanceCordoned(
                instance_id=instance_id, generation=generation, cordoned=cordoned
            )
        )

    def cancel(
        self, request_id: str, reason: str = "the client left", proxy: str = "x"
    ) -> list[effects.Effect]:
        cancel = events.CancelRequested(request_id=request_id, reason=reason, proxy_id=proxy)
        return self.step(cancel)

    def tick(self, seconds: float) -> list[effects.Effect]:
        self.now_s += seconds
        return self.step(events.Tick())

    def serve(
        self, request_id: str, prefill: str = "p0", decode: str = "d0"
    ) -> list[effects.Effect]:
        """Sends all reports of correct workers about a dispatched request, to its end."""
        return [
            *self.chunk_started(prefill, request_id),
            *self.computed(prefill, request_id),
            *self.released(prefill, request_id),
            *self.decoding(decode, request_id),
            *self.finished(decode, request_id),
        ]


def of(kind: type[E], found: list[effects.Effect]) -> list[E]:
    """Returns the effects of one kind, in order."""
    return [effect for effect in found if isinstance(effect, kind)]


def queues(found: list[effects.Effect]) -> dict[str, list[str]]:
    """Returns the ordered queues by instance: "a", "a.1" for its second chunk, "a+b" batched."""
    return {
        order.instance_id: [
            "+".join(
                r.request_id if r.chunk_index == 0 else f"{r.request_id}.{r.chunk_index}"
                for r in entry
            )
            for entry in order.queue
        ]
        for order in of(effects.Order, found)
    }
