"""A decode instance beside a prefill instance: its reports, and what it releases at every end of a
request at every stage.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from millrace.core.incarnation import Incarnation
from millrace.core.kv.pages import pages_of_request
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import Drain
from millrace.decode.loop import DecodeRole
from millrace.instance.gauges import add_gauges
from millrace.prefill.loop import PrefillRole
from millrace.state.memory_store import MemoryStore
from millrace.state.store import StoreError
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub
from support.role_pair import Pair, live_pair
from support.tiny_models import oracle, prompt
from support.worker_roles import (
    LiveRole,
    admit_decode,
    config,
    live_roles,
    remember,
    run_prefill,
    spec,
)

SETTINGS = config(max_chunk_tokens=512, max_batch=4)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with live_pair(SETTINGS, SETTINGS) as made:
        yield made


async def test_tokens_are_the_models_and_reach_proxy_and_journal(pair: Pair) -> None:
    await pair.ask("r", 37, max_tokens=12)
    finished = await pair.decode.said("request_finished", "r")

    expected = oracle("llama").greedy(prompt(37), 12)
    assert pair.decode.kinds("r")[-2:] == ["decode_started", "request_finished"]
    assert (finished.reason, finished.generated_tokens) == ("length", 12)
    assert pair.used_pages == 0
    await eventually(lambda: ("r", 0) in pair.ends)
    assert pair.tokens["r", 0] == expected
    assert pair.ends["r", 0] == "length"
    spans = [span.name for span in pair.spans("r")]
    assert {"kv_handshake", "kv_transfer", "first_decode_step"} <= set(spans)
    assert len(spans) == len(set(spans))
    await asyncio.sleep(0.05)
    assert (await pair.store.journal("r", 0)).tolist() == expected


async def test_a_transfer_begins_when_decode_has_admitted_the_request(pair: Pair) -> None:
    request = spec("r", 37)
    await remember(pair.store, request, prompt(37))
    pair.prefill.role.on_command(run_prefill(request, pair.decode.member))
    await pair.prefill.said("chunk_finished", "r")
    admitted_s = time.time() - request.arrival_unix_s
    pair.decode.role.on_command(admit_decode(request))
    await eventually(lambda: ("r", 0) in pair.ends)
    (transfer,) = [one for one in pair.spans("r") if one.name == "kv_transfer"]
    assert admitted_s <= transfer.start_s <= transfer.end_s


async def test_the_last_tokens_are_journalled_at_the_end() -> None:
    settings = config()
    store, hub = MemoryStore(settings.store), MemoryHub()
    prefill = LiveRole(PrefillRole, settings, name="prefill-0", hub=hub, store=store)
    decode = LiveRole(DecodeRole, settings, name="decode-0", hub=hub, store=store)
    async with live_roles(prefill, decode):
        request = spec("r", 10)
        await remember(store, request, prompt(10))
        decode.role.on_command(admit_decode(request))
        prefill.role.on_command(run_prefill(request, decode.member))
        await decode.said("request_finished", "r")
    assert (await store.journal("r", 0)).tolist() == oracle("llama").greedy(prompt(10), 8)


async def test_steps_that_run_ahead_stream_the_same_tokens_and_release_all_pages() -> None:
    free = oracle("llama").greedy(prompt(21), 14)
    at = next(i for i in range(3, 14) if free[i] not in free[:i])
    ahead = config(max_chunk_tokens=512, max_batch=4, decode_ahead="on")
    async with live_pair(SETTINGS, ahead) as pair:
        await pair.ask("long", 37, max_tokens=20)
        await pair.ask("stops", 21, max_tokens=14, stop_token_ids=[free[at]])
        await pair.ask("gone", 8, max_tokens=500)
        await eventually(lambda: len(pair.tokens.get(("gone", 0), [])) > 3)
        pair.decode.cancel("gone")
        for name in ("long", "stops"):
            await pair.decode.said("request_finished", name)
        await pair.decode.said("request_released", "gone")
        await eventually(lambda: {("long", 0), ("stops", 0)} <= pair.ends.keys())
        assert pair.used_pages == 0
    assert pair.tokens["long", 0] == oracle("llama").greedy(prompt(37), 20)
    assert pair.tokens["stops", 0] == free[: at + 1]
    assert (pair.ends["long", 0], pair.ends["stops", 0]) == ("length", "stop")


async def test_all_choices_may_end_with_their_first_token(pair: Pair) -> None:
    await pair.ask("r", 33, max_tokens=1, n=3)
    finished = await pair.decode.said("request_finished", "r")

    assert finished.generated_tokens == 3
    assert pair.decode.kinds("r") == ["first_token_sent", "request_finished"]
    assert pair.used_pages == 0
    await pair.prefill.said("request_released", "r")


async def test_some_choices_end_with_their_first_token(pair: Pair) -> None:
    """Choice 0 ends at once; the others still copy the prompt's last page from it."""
    ids, sampling = prompt(21), {"max_tokens": 16, "n": 4, "temperature": 1.5, "seed": 3}
    await pair.ask("free", 21, **sampling)
    await pair.decode.said("request_finished", "free")
    await eventually(lambda: len(pair.ends) == 4)
    free = [pair.tokens["free", choice] for choice in range(4)]
    assert len({tokens[0] for tokens in free}) > 1, "the seed gives no choice a token of its own"

    await pair.ask("r", 21, **sampling, stop_token_ids=[free[0][0]])
    await pair.decode.said("request_finished", "r")
    await eventually(lambda: len(pair.ends) == 8)

    for choice, tokens in enumerate(free):
        stop = tokens.index(free[0][0]) + 1 if free[0][0] in tokens else len(tokens)
        assert pair.tokens["r", choice] == tokens[:stop]
    assert pair.ends["r", 0] == "stop"
    assert len(ids) % 16


async def test_a_request_waits_until_the_batch_has_room_for_all_choices(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, go_on = pair.decode.engine.runner, threading.Event()
    decode = runner.decode

    def held(*arguments: Any) -> Any:
        assert go_on.wait(HANG_S)
        return decode(*arguments)

    monkeypatch.setattr(runner, "decode", held)
    await pair.ask("three", 20, n=3, max_tokens=200)
    await pair.decode.said("decode_started", "three")
    await pair.ask("four", 20, n=4)
    await asyncio.sleep(0.1)
    assert "decode_started" not in pair.decode.kinds("four")
    pair.decode.cancel("three")
    go_on.set()

    await pair.decode.said("decode_started", "four")
    await pair.decode.said("request_finished", "four")


async def test_an_admission_without_room_is_failed_and_released(pair: Pair) -> None:
    pool = pair.decode.engine.pool
    held = pool.allocate(pool.free_pages - 2)
    await pair.admit("r", 40)

    assert pair.decode.kinds("r") == ["request_failed", "request_released"]
    refused = pair.decode.messages[0][1]
    assert refused.retryable and not refused.fault
    pool.free(held)
    await pair.admit("wide", 10, n=5)
    assert pair.decode.kinds("wide") == ["request_failed", "request_released"]


async def test_what_is_reserved_is_what_placement_counts(pair: Pair) -> None:
    for n, tokens in ((1, 16), (3, 17), (4, 31)):
        await pair.admit(f"r{n}", tokens, n=n, max_tokens=20)
        assert pair.used_pages == pages_of_request(tokens, 20, n, 16)
        pair.decode.cancel(f"r{n}")
        await pair.decode.said("request_released", f"r{n}", 1)
        assert pair.used_pages == 0


async def test_pages_are_free_when_the_scheduler_hears_of_it(pair: Pair) -> None:
    """The scheduler places the next request at the same moment."""
    free_at: list[int] = []
    send = pair.decode.messages.append

    class Watched(list[Any]):
        def append(self, entry: Any) -> None:
            if entry[0] in ("request_finished", "request_released"):
                free_at.append(pair.used_pages)
            send(entry)

    pair.decode.messages = Watched(pair.decode.messages)
    await pair.ask("done", 30)
    await eventually(lambda: len(free_at) == 1)
    await pair.ask("dropped", 30, max_tokens=500)
    await eventually(lambda: len(pair.tokens.get(("dropped", 0), [])) > 3)
    pair.decode.cancel("dropped")
    await eventually(lambda: len(free_at) == 2)

    assert free_at == [0, 0]


async def test_cancelled_before_any_sender_came(pair: Pair) -> None:
    await pair.admit("r", 40)
    pair.decode.cancel("r")

    await pair.decode.said("request_released", "r", 5)
    assert pair.decode.kinds("r") == ["request_released"]
    assert pair.used_pages == 0


async def test_cancelled_while_kv_comes_in(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("r", 3000)
        await eventually(lambda: pair.prefill.has_shaken_hands("r"))
        pair.decode.cancel("r")  # only the decode instance tells prefill
        await pair.decode.said("request_released", "r", 5)
    assert pair.used_pages == 0
    pair.prefill.cancel("r")
    await pair.prefill.said("request_released", "r", 5)


async def test_cancelled_in_the_batch(pair: Pair) -> None:
    await pair.ask("r", 20, max_tokens=500)
    await eventually(lambda: len(pair.tokens.get(("r", 0), [])) > 3)
    pair.decode.cancel("r")

    await pair.decode.said("request_released", "r", 5)
    seen = len(pair.tokens["r", 0])
    await asyncio.sleep(0.1)
    assert len(pair.tokens["r", 0]) <= seen + 1


async def failed_attempt(pair: Pair, tokens: int) -> tuple[RequestSpec, Any]:
    """Lets attempt 1 fail before its last pass; returns (request, decode's report)."""
    with pair.prefill.held_before_the_last_chunk():
        request = await pair.admit("r", tokens)
        pair.prefill.role.on_command(run_prefill(request, pair.decode.member))
        await pair.decode.said("prefix_landed", "r")
        pair.prefill.cancel("r")
    failed = await pair.decode.said("request_failed", "r")
    await pair.prefill.said("request_released", "r")
    return request, failed


async def test_a_failed_attempt_is_gone_on_from_what_has_landed(pair: Pair) -> None:
    request, failed = await failed_attempt(pair, 900)
    landed = await pair.decode.said("prefix_landed", "r")
    assert (failed.retryable, failed.attempt, landed.attempt) == (True, 1, 1)
    assert not failed.fault  # prefill reports why it gave up
    assert failed.kept_tokens == landed.tokens == 450
    assert "request_released" not in pair.decode.kinds("r")

    kept = 437  # any prefix
    run = run_prefill(request, pair.decode.member, start_token=kept, attempt=2)
    pair.decode.role.on_command(admit_decode(request, attempt=2, kept_tokens=kept))
    pair.prefill.role.on_command(run)
    await pair.decode.said("request_finished", "r")
    await eventually(lambda: ("r", 0) in pair.ends)
    assert pair.tokens["r", 0] == oracle("llama").greedy(prompt(900), 8)
    assert pair.used_pages == 0


async def test_a_failed_attempt_that_nobody_goes_on_from_is_cancelled(pair: Pair) -> None:
    await failed_attempt(pair, 900)
    assert pair.used_pages > 0
    pair.decode.cancel("r")
    await pair.decode.said("request_released", "r")
    assert pair.used_pages == 0
    pair.decode.messages.clear()
    await pair.store.delete("r")
    await pair.ask("r", 60)
    await pair.decode.said("request_finished", "r")


async def test_nothing_landed_nothing_is_kept(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("r", 60)
        await eventually(lambda: pair.prefill.has_shaken_hands("r"))
        pair.prefill.cancel("r")
    failed = await pair.decode.said("request_failed", "r")
    assert failed.retryable and not failed.kept_tokens
    await pair.decode.said("request_released", "r")
    assert "prefix_landed" not in pair.decode.kinds("r")


@pytest.mark.parametrize("admitted", [False, True])
async def test_tokens_that_are_not_here_cannot_be_kept(pair: Pair, admitted: bool) -> None:
    request = spec("r", 60)
    if admitted:
        pair.decode.role.on_command(admit_decode(request))
    pair.decode.role.on_command(admit_decode(request, attempt=2, kept_tokens=30))
    failed = await pair.decode.said("request_failed", "r")
    assert failed.retryable and not failed.kept_tokens
    released = await pair.decode.said("request_released", "r")
    assert failed.attempt == released.attempt == 2


async def test_an_attempt_that_meets_the_end_of_the_one_before_is_answered_by_its_release(
    pair: Pair,
) -> None:
    request = await pair.admit("r", 60)
    pair.decode.cancel("r")
    pair.decode.role.on_command(admit_decode(request, attempt=2, kept_tokens=30))
    assert (await pair.decode.said("request_released", "r")).attempt == 2
    assert pair.decode.kinds("r") == ["request_released"]


async def test_a_prompt_that_penalties_need_but_the_store_has_not(pair: Pair) -> None:
    pair.store.error = StoreError("no server")
    await pair.admit("r", 30, repetition_penalty=1.2)

    failed = await pair.decode.said("request_failed", "r")
    assert failed.retryable and failed.prompt_unread
    await pair.decode.said("request_released", "r")


async def test_a_proxy_that_is_gone_frees_its_requests() -> None:
    soon = replace(SETTINGS, scheduler=replace(SETTINGS.scheduler, heartbeat_s=0.05, lease_s=0.1))
    async with live_pair(SETTINGS, soon) as pair:
        unread = Incarnation("proxy-1", 1)
        request = replace(spec("r", 20, max_tokens=2000), proxy=unread)
        await remember(pair.store, request, prompt(20))
        pair.decode.role.on_command(admit_decode(request))
        pair.prefill.role.on_command(run_prefill(request, pair.decode.member))

        finished = await pair.decode.said("request_finished", "r")
        assert finished.reason == "moved"  # a proxy that lives after all migrates it
        await pair.decode.role.wait_idle()
        assert "request_failed" not in pair.decode.kinds("r")


async def one_streams_and_one_waits(pair: Pair) -> None:
    await pair.ask("streams", 20, max_tokens=2000)
    await eventually(lambda: len(pair.tokens.get(("streams", 0), [])) > 3)
    await pair.admit("waits", 20)


@pytest.mark.parametrize("dropped", [True, False])
async def test_what_streams_when_the_instance_lets_go_of_it_moves(
    pair: Pair, dropped: bool
) -> None:
    await one_streams_and_one_waits(pair)
    async with asyncio.timeout(HANG_S):
        if dropped:
            await pair.decode.role.drop_all("the scheduler is gone")
        else:
            pair.decode.role.on_command(Drain(abort=False))
            await pair.decode.role.wait_idle()

    assert pair.used_pages == 0
    await eventually(lambda: ("streams", 0) in pair.ends)
    assert pair.ends == {("streams", 0): "moved"}
    expected = oracle("llama").greedy(prompt(20), len(pair.tokens["streams", 0]))
    assert pair.tokens["streams", 0] == expected
    spans = {span.name for span in pair.spans("streams")}
    assert {"kv_transfer", "first_decode_step"} <= spans
    finished = await pair.decode.said("request_finished", "streams")
    assert finished.reason == "moved"
    assert pair.decode.kinds("waits") == ["request_released"]
    assert "request_failed" not in pair.decode.kinds("streams")


async def test_what_an_abort_ends_has_failed_for_good(pair: Pair) -> None:
    await one_streams_and_one_waits(pair)
    pair.decode.role.on_command(Drain(abort=True))
    for request_id in ("streams", "waits"):
        failed = await pair.decode.said("request_failed", request_id)
        assert not failed.retryable
        await pair.decode.said("request_released", request_id)
    assert pair.used_pages == 0
    assert not pair.ends  # the scheduler tells the proxy


async def test_an_instance_that_was_emptied_works_on(pair: Pair) -> None:
    await one_streams_and_one_waits(pair)
    pair.decode.role.on_command(Drain(abort=False))
    await pair.decode.said("request_finished", "streams")
    await pair.ask("r", 20)
    await pair.decode.said("request_finished", "r")
    await eventually(lambda: ("r", 0) in pair.ends)
    assert pair.tokens["r", 0] == oracle("llama").greedy(prompt(20), 8)


async def test_a_stream_whose_kv_never_comes_moves(pair: Pair) -> None:
    """The first token is out when the store fails to give the prompt that penalties need."""
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def fail(*_: Any) -> Any:
        reading.set()
        await go_on.wait()
        raise StoreError("no server")

    found = pair.store.prompt_ids
    request = spec("r", 20, repetition_penalty=1.2)
    await remember(pair.store, request, prompt(20))
    pair.store.prompt_ids = fail  # type: ignore[method-assign]
    pair.decode.role.on_command(admit_decode(request))
    await reading.wait()
    pair.store.prompt_ids = found  # type: ignore[method-assign]
    pair.prefill.role.on_command(run_prefill(request, pair.decode.member))
    await eventually(lambda: ("r", 0) in pair.tokens)
    go_on.set()
    assert (await pair.decode.said("request_finished", "r")).reason == "moved"
    await eventually(lambda: pair.ends == {("r", 0): "moved"})
    assert pair.used_pages == 0


async def test_a_continuation_goes_on_as_if_nothing_had_happened(pair: Pair) -> None:
    """Prefill samples the first token after a migration; penalties and draws continue."""
    sampling: dict[str, Any] = {
        "temperature": 1.1,
        "seed": 5,
        "repetition_penalty": 1.3,
        "frequency_penalty": 0.4,
    }
    await pair.ask("whole", 37, max_tokens=24, **sampling)
    await pair.decode.said("request_finished", "whole")
    await eventually(lambda: ("whole", 0) in pair.ends)
    whole = pair.tokens["whole", 0]

    rest = replace(spec("rest", 37 + 9, max_tokens=24 - 9, **sampling), resumed_tokens=9)
    await remember(pair.store, rest, prompt(37) + whole[:9])
    pair.decode.role.on_command(admit_decode(rest))
    pair.prefill.role.on_command(run_prefill(rest, pair.decode.member))
    await eventually(lambda: ("rest", 0) in pair.ends)
    assert pair.tokens["rest", 0] == whole[9:]
    assert pair.ends["rest", 0] == pair.ends["whole", 0] == "length"


async def test_the_heartbeat_tells_the_pace_of_what_runs(pair: Pair) -> None:
    assert pair.decode.role.heartbeat().tbt_s == 0.0
    await pair.ask("r", 20, max_tokens=200)
    await pair.decode.said("request_finished", "r")
    add_gauges(pair.decode.registry, pair.decode.role, pair.decode.engine)
    exposed = pair.decode.registry.render()[0].decode()  # without an effect on heartbeats
    assert "millrace_decode_running_requests 0.0" in exposed
    assert 0.0 < pair.decode.role.heartbeat().tbt_s < 1.0
    assert pair.decode.role.heartbeat().tbt_s == 0.0


async def test_a_failing_step_ends_the_role(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("the device is gone")

    store, hub = MemoryStore(SETTINGS.store), MemoryHub()
    prefill = LiveRole(PrefillRole, SETTINGS, name="prefill-0", hub=hub, store=store)
    decode = LiveRole(DecodeRole, SETTINGS, name="decode-0", hub=hub, store=store)
    monkeypatch.setattr(decode.engine.runner, "decode", fail)
    request = spec("r", 20)
    await remember(store, request, prompt(20))
    async with live_roles(prefill):
        await decode.start()
        decode.role.on_command(admit_decode(request))
        prefill.role.on_command(run_prefill(request, decode.member))
        with pytest.raises(RuntimeError, match="the device is gone"):
            async with asyncio.timeout(HANG_S):
                await decode.ended()
        await decode.close()
