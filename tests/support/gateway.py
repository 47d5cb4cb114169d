"""A real proxy over HTTP, in front of a scripted scheduler and decode instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np
import openai
from tokenizers import Tokenizer

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.core.config import Config, load_config
from millrace.core.config.models import ModelConfig
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.events import CancelRequested
from millrace.core.span import Span
from millrace.core.token_events import NO_DETAIL, PositionLogprobs, TokenDetail, TokenEvent
from millrace.proxy.service import Proxy, listen
from millrace.wire.codec.token_events import encode_spans
from support.deadlines import HANG_S, eventually
from support.scripted_fleet import ScriptedFleet

MODEL = "tiny"
CONTEXT_TOKENS = 2048


@dataclass
class Script:
    """What the fleet does with a submission: by default it says `reply`, a token a step.

    `hold` keeps tokens back after the first `hold_after` ones until it is set. `others` are the
    replies of the choices after the first one.
    """

    reply: str = "Hello there"
    others: Sequence[str] = ()
    finish: str = "stop"
    hold: asyncio.Event | None = None
    hold_after: int = 1
    on_submit: Callable[[RequestSpec], None] | None = None
    token_ids: list[int] | None = None
    spans: list[Span] = field(default_factory=list)
    #: Of every token, by choice.
    logprobs: list[float] = field(default_factory=lambda: [-0.5])
    #: Of prefill-only requests, in order.
    vectors: list[list[float]] = field(default_factory=lambda: [[float(i) for i in range(8)]])


class Fleet(ScriptedFleet):
    """Records what it is asked, and plays `script`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(self._submitted, self._cancelled)
        self.tokenizer = tokenizer
        self.script = Script()
        self.specs: list[RequestSpec] = []
        self.cancels: list[CancelRequested] = []
        self.cancelled = asyncio.Event()
        self.submitted = asyncio.Event()
        self._playing: set[asyncio.Task[None]] = set()

    def _submitted(self, spec: RequestSpec) -> None:
        self.specs.append(spec)
        self.submitted.set()
        if self.script.on_submit is not None:
            self.script.on_submit(spec)
            return
        self.place(spec)
        self.play_later(spec)

    def play_later(self, spec: RequestSpec) -> None:
        """Starts to emit what the script says."""
        task = asyncio.create_task(self.play(spec, self.script))
        self._playing.add(task)
        task.add_done_callback(self._playing.discard)

    def _cancelled(self, cancel: CancelRequested) -> None:
        self.cancels.append(cancel)
        self.cancelled.set()

    def move(self, spec: RequestSpec, why: str = "") -> None:
        """Its decode instance leaves, or has no room: the answer may be migrated."""
        self.end(spec, "moved", why)

    def end(self, spec: RequestSpec, reason: str, error: str) -> None:
        """Ends a request's tokens without its answer."""
        detail = TokenDetail(error=error)
        self.emit(spec.proxy.id, [TokenEvent(spec.request_id, finish_reason=reason, detail=detail)])

    async def play(self, spec: RequestSpec, script: Script) -> None:
        """Emits the script's tokens for every choice, one a step; of a continuation the rest. No
        choice gets more than `max_tokens`.

        A prefill-only request gets its result.
        """
        if spec.sampling.max_tokens == 0:
            self.emit(spec.proxy.id, self.result(spec, script))
            return
        stops = script.finish == "stop" and script.token_ids is None
        most = spec.resumed_tokens + spec.sampling.max_tokens
        replies = (self._ids(spec, choice, script) for choice in range(spec.sampling.n))
        answers = [(ids[:most], "length" if ids[most:] else script.finish) for ids in replies]
        for position in range(spec.resumed_tokens, max(len(ids) for ids, _ in answers)):
            if script.hold is not None and position == script.hold_after:
                await script.hold.wait()
            self.emit(
                spec.proxy.id,
                [
                    token_event(
                        spec,
                        choice,
                        position,
                        ids[position],
                        script,
                        finish=finish if position == len(ids) - 1 else "",
                        stops=stops and finish == "stop",
                    )
                    for choice, (ids, finish) in enumerate(answers)
                    if position < len(ids)
                ],
            )
            await asyncio.sleep(0)

    def _ids(self, spec: RequestSpec, choice: int, script: Script) -> list[int]:
        """Returns all tokens of a choice, from the beginning of its answer."""
        if script.token_ids is not None:
            return script.token_ids
        replies = dict(enumerate(script.others, 1))
        reply = replies.get(spec.sampling.first_choice + choice, script.reply)
        ids: list[int] = self.tokenizer.encode(reply, add_special_tokens=False).ids
        return [*ids, 1] if script.finish == "stop" else ids

    def result(self, spec: RequestSpec, script: Script) -> list[TokenEvent]:
        """Returns an event per choice; the first has the result."""
        first = {"spans": encode_spans(script.spans), "cached_tokens": 3}
        if spec.pooling:
            vector = script.vectors[self.specs.index(spec) % len(script.vectors)]
            first["pooled"] = np.array(vector, dtype="<f4").tobytes()
        if spec.sampling.prompt_logprobs >= 0:
            first["prompt_logprobs"] = _of_prompt(spec)
        details = [TokenDetail(**first), *[NO_DETAIL] * (spec.sampling.n - 1)]
        return [
            TokenEvent(
                spec.request_id,
                choice,
                finish_reason="length",
                detail=detail,
                begins=choice == 0,
            )
            for choice, detail in enumerate(details)
        ]


def token_event(
    spec: RequestSpec,
    choice: int,
    position: int,
    token_id: int,
    script: Script,
    *,
    finish: str,
    stops: bool,
) -> TokenEvent:
    """`finish`: the reason, at the last token; empty before it."""
    sampling, logprobs, first = spec.sampling, (), {}
    if sampling.logprobs >= 0:
        logprob = script.logprobs[choice % len(script.logprobs)]
        logprobs = (_logprobs(token_id, sampling.logprobs, logprob),)
    if position == spec.resumed_tokens and choice == 0:
        first = {"spans": encode_spans(script.spans), "cached_tokens": 3}
        if sampling.prompt_logprobs >= 0:
            first["prompt_logprobs"] = _of_prompt(spec)
    detail = TokenDetail(logprobs=logprobs, **first)
    return TokenEvent(
        spec.request_id,
        choice,
        [token_id],
        finish_reason=finish,
        stop_token_id=token_id if finish and stops else -1,
        detail=detail,
        begins=bool(first),
    )


def _of_prompt(spec: RequestSpec) -> tuple[PositionLogprobs | None, ...]:
    top = spec.sampling.prompt_logprobs
    return tuple(_logprobs(i, top) if i else None for i in range(spec.prompt_tokens))


def _logprobs(token_id: int, top: int, logprob: float = -0.5) -> PositionLogprobs:
    return PositionLogprobs((token_id, logprob), tuple((10 + i, -1.0 - i) for i in range(top)))


@dataclass
class Stack:
    """A running proxy and its fleet. `http` and `client` talk to it."""

    proxy: Proxy
    fleet: Fleet
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.proxy.port}"

    async def placed(self) -> None:
        """Returns when the proxy knows where its requests are."""
        await eventually(lambda: any(r.confirmed for r in self.proxy.gateway.requests))

    async def begun(self) -> None:
        """Returns when the proxy has a token of a request."""
        await eventually(lambda: any(r.completion_tokens for r in self.proxy.gateway.requests))

    async def state_of(self, request_id: str) -> str | None:
        """As the store has it."""
        record = await self.proxy.store.get(request_id)
        return None if record is None else record.state

    async def idle(self) -> None:
        """Returns when the proxy holds no request any more; or fails."""
        await eventually(lambda: self.proxy.gateway.inflight == 0)
        self.proxy.gateway.check_integrity()


def capture_prompts(stack: Stack) -> list[str]:
    """Returns a list that gets the text of every prompt from now on."""
    found: list[str] = []

    def keep(spec: RequestSpec) -> None:
        async def play() -> None:
            ids = await stack.proxy.store.prompt_ids(spec.request_id)
            found.append(stack.fleet.tokenizer.decode(ids.tolist(), skip_special_tokens=False))
            stack.fleet.place(spec)
            await stack.fleet.play(spec, stack.fleet.script)

        tasks.append(asyncio.create_task(play()))

    tasks: list[asyncio.Task[None]] = []
    stack.fleet.script.on_submit = keep
    return found


@asynccontextmanager
async def gateway(
    folder: Path, *settings: str, config: Config | None = None, markers: Sequence[str] = ()
) -> AsyncIterator[Stack]:
    """A proxy on a free port, ready. `settings` are `section.field=value` overrides; `markers` are
    special tokens of the model.
    """
    write_stub_model(folder, context_tokens=CONTEXT_TOKENS, markers=markers)
    fleet = Fleet(Tokenizer.from_file(str(folder / "tokenizer.json")))
    await fleet.start()
    config = config or load_config(overrides=settings)
    served = ModelConfig(name=MODEL, model=str(folder), scheduler=fleet.scheduler_address)
    proxy = Proxy(config, served)
    await proxy.start(listen("127.0.0.1", 0))
    url = f"http://127.0.0.1:{proxy.port}"
    try:
        # Without `verify`: reading the authorities takes 20 ms, and there is no TLS.
        async with (
            httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False, verify=False) as http,
            httpx.AsyncClient(trust_env=False, verify=False) as transport,
            openai.AsyncOpenAI(
                base_url=f"{url}/v1",
                api_key="none",
                max_retries=0,
                timeout=HANG_S,
                http_client=transport,
            ) as client,
        ):
            stack = Stack(proxy, fleet, http, client)
            await eventually(lambda: proxy.gateway.ready)
            yield stack
            await stack.idle()
    finally:
        await proxy.stop()
        await fleet.stop()
