"""Answers that grow in too little memory: each has the same tokens as alone, whichever requests are
preempted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from millrace.core.config import Config
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.scheduler.commands import Drain
from millrace.decode.loop import DecodeRole
from millrace.instance.role import WorkerContext
from millrace.instance.tokens import streams as token_streams
from millrace.proxy.generation.continuation import continuation
from support.deadlines import eventually
from support.metrics import total
from support.role_pair import Pair, live_pair
from support.tiny_models import oracle, prompt
from support.worker_roles import (
    admit_decode,
    config,
    registration,
    remember,
    run_prefill,
)

PAGE_BYTES = 3 * 2 * 2 * 16 * 12 * 4  # of the tiny model, per 16 tokens
PAGES = 20


def settings(
    pages: int = PAGES, swap_pages: int = 0, max_batch: int = 8, **scheduler: Any
) -> Config:
    """Settings of a decode instance. It has one more page than requests can use, for itself."""
    tree = config(
        max_batch=max_batch,
        kv_bytes=(pages + 1) * PAGE_BYTES,
        swap_bytes=swap_pages * PAGE_BYTES,
        prefix_cache="off",
    )
    chosen = {"decode_reserve": "grow", "decode_headroom_tokens": 8, "lease_s": 30, **scheduler}
    return replace(tree, scheduler=replace(tree.scheduler, **chosen))


class Asker:
    """Sends requests and migrates moved ones, as a proxy does. At the end, nothing is held."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.lives: dict[str, int] = {}

    async def answer(self, name: str, tokens: int, **sampling: Any) -> list[int]:
        """Returns the tokens of choice 0."""
        ids, life = prompt(tokens), name
        request = await self.pair.admit(name, tokens, **sampling)
        found: list[int] = []
        while True:
            self.pair.prefill.role.on_command(run_prefill(request, self.pair.decode.member))
            await eventually(lambda life=life: (life, 0) in self.pair.ends)
            found += self.pair.tokens[life, 0]
            if self.pair.ends[life, 0] != "moved":
                return found
            self.lives[name] = self.lives.get(name, 1) + 1
            life = f"{name}-{self.lives[name]}"
            generated = len(self.pair.tokens[request.request_id, 0])
            request = continuation(request, life, generated)
            await remember(self.pair.store, request, ids + found)
            self.pair.decode.role.on_command(admit_decode(request))

    def count(self, name: str, **labels: str) -> float:
        return total(self.pair.decode.registry, name, **labels)

    def preempted(self, by: str) -> float:
        return self.count("millrace_decode_preempted_requests_total", by=by)


@asynccontextmanager
async def asking(decode: Config) -> AsyncIterator[Asker]:
    async with live_pair(config(max_chunk_tokens=512), decode) as pair:
        yield Asker(pair)
        await pair.decode.role.wait_idle()
        pair.decode.role.check_integrity()


WORK = [(40, 150), (25, 100), (60, 120), (33, 90), (48, 140), (20, 160)]


@pytest.mark.parametrize("swap_pages", [200, 12, 0], ids=["swap", "both", "recompute"])
async def test_answers_longer_than_memory_end_with_the_right_tokens(swap_pages: int) -> None:
    async with asking(settings(swap_pages=swap_pages)) as asker:
        found = await asyncio.gather(
            *(
                asker.answer(f"r{i}", tokens, max_tokens=most)
                for i, (tokens, most) in enumerate(WORK)
            )
        )
        for (tokens, most), got in zip(WORK, found, strict=True):
            assert got == oracle("llama").greedy(prompt(tokens), most)
        assert (asker.preempted("swap") > 0) == (swap_pages > 0)
        assert (asker.preempted("recompute") > 0) == (swap_pages < 200)
        assert bool(asker.lives) == (swap_pages < 200)


async def filled(asker: Asker, count: int = 4) -> None:
    """Sends `count` requests with long answers, until one of them is in host memory."""
    for i in range(count):
        await asker.pair.ask(f"r{i}", 30, max_tokens=200)
        await eventually(lambda i=i: asker.pair.tokens.get((f"r{i}", 0)) or asker.preempted("swap"))
    await eventually(lambda: asker.preempted("swap"))


async def test_a_drain_moves_who_is_in_host_memory_too() -> None:
    async with asking(settings(swap_pages=100)) as asker:
        await filled(asker)
        asker.pair.decode.role.on_command(Drain(abort=False))
        await asker.pair.decode.role.wait_idle()
        streamed = {key for key, tokens in asker.pair.tokens.items() if tokens}
        await eventually(lambda: streamed <= set(asker.pair.ends))
        assert set(asker.pair.ends.values()) == {"moved"}
        for (name, _), tokens in asker.pair.tokens.items():
            assert tokens == oracle("llama").greedy(prompt(30), 200)[: len(tokens)], name


async def test_a_proxy_that_is_gone_takes_its_swapped_requests_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with asking(settings(swap_pages=100)) as asker:
        await filled(asker)
        monkeypatch.setattr(token_streams, "MOST_WAITING_EVENTS", 0)  # it reads too slowly
        await asker.pair.decode.role.wait_idle()
        assert asker.pair.used_pages == 0
        told = asker.pair.decode.messages  # no error: if it lives, it migrates them
        assert "moved" in {one.reason for kind, one in told if kind == "request_finished"}
        assert "request_failed" not in {kind for kind, _ in told}


async def test_the_waterfall_shows_the_absence() -> None:
    async with asking(settings(swap_pages=100)) as asker:
        asked = [asker.answer(f"r{i}", 30, max_tokens=100) for i in range(4)]
        await asyncio.gather(*asked)
        spans = [span for i in range(4) for span in asker.pair.spans(f"r{i}")]
        assert any(span.name == "preempted" for span in spans)
        name = "millrace_decode_swapped_bytes_total"
        out, back = (asker.count(name, direction=way) for way in ("out", "in"))
        assert out == back > 0 and out % PAGE_BYTES == 0


async def test_heartbeats_tell_what_is_left_for_others() -> None:
    async with asking(settings(swap_pages=100)) as asker:
        role, pool = asker.pair.decode.role, asker.pair.decode.engine.pool
        assert role.heartbeat().free_pages == PAGES
        await filled(asker)
        assert role.heartbeat().free_pages <= pool.free_pages
        role.on_command(Drain())


async def test_what_could_never_fit_is_refused_at_once() -> None:
    async with asking(settings()) as asker:
        await asker.pair.admit("r", 40, max_tokens=PAGES * 16)
        assert asker.pair.decode.kinds("r") == ["request_failed", "request_released"]
        failed = await asker.pair.decode.said("request_failed", "r")
        assert "may be wanted in all" in failed.message


async def test_the_instance_says_how_long_its_steps_take() -> None:
    step = DecodeStepTime(base_s=0.1, per_sequence_s=0.02, per_context_token_s=0.003)
    async with asking(settings()) as asker:
        assert registration(asker.pair.decode).decode_step is None

    def timed(context: WorkerContext) -> DecodeRole:
        return DecodeRole(replace(context, decode_step=step))

    async with live_pair(config(), settings(), build=timed) as pair:
        assert registration(pair.decode).decode_step == step
