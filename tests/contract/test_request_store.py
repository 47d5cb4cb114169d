"""What every RequestStore does, in memory, on a real redis-server and on a cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import numpy as np
import pytest

from millrace.state.open import open_store
from millrace.state.store import (
    IdTaken,
    JournalEntry,
    RequestRecord,
    RequestStore,
    StateUpdate,
    StoreError,
)
from support.deadlines import HANG_S
from support.stores import chosen_redis, patient

IDS = np.array([0, 1, 2**31 - 1, 7, 128_000], dtype=np.int32)

Opener = Callable[..., RequestStore]


@pytest.fixture(params=["memory", "redis", "cluster"])
async def opener(request: pytest.FixtureRequest) -> AsyncIterator[Opener]:
    """Opens stores of one kind with the settings given; all of Redis' on the same server."""
    async with AsyncExitStack() as stack:
        url = "memory://"
        if request.param != "memory":
            url = await stack.enter_async_context(chosen_redis(request, "proxy"))

        def open_one(**settings: float | str) -> RequestStore:
            store = open_store(patient(url, **settings))
            stack.push_async_callback(store.close)
            return store

        yield open_one


@pytest.fixture
def store(opener: Opener) -> RequestStore:
    return opener()


def entry(request_id: str, choice: int, *token_ids: int, start: int = 0) -> JournalEntry:
    return JournalEntry(request_id=request_id, choice=choice, start=start, token_ids=token_ids)


async def test_a_new_request_reads_back(store: RequestStore) -> None:
    spec = bytes(range(256))
    await store.create("a", spec=spec, prompt_ids=IDS)
    assert await store.get("a") == RequestRecord(
        request_id="a", state="queued", decode_id="", spec=spec, prompt_tokens=IDS.size
    )
    ids = await store.prompt_ids("a")
    assert ids.dtype == np.int32 and ids.flags.writeable
    np.testing.assert_array_equal(ids, IDS)


async def test_an_empty_spec_reads_back(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    record = await store.get("a")
    assert record is not None and record.spec == b""


async def test_the_store_keeps_its_own_copy_of_the_prompt(store: RequestStore) -> None:
    ids = IDS.copy()
    await store.create("a", spec=b"", prompt_ids=ids)
    ids[:] = 9
    (await store.prompt_ids("a"))[:] = 8
    np.testing.assert_array_equal(await store.prompt_ids("a"), IDS)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 5), (2, 4), (4, 5), (0, None), (4, None)])
async def test_slices_of_a_prompt(store: RequestStore, start: int, stop: int | None) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    np.testing.assert_array_equal(await store.prompt_ids("a", start, stop), IDS[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (5, None), (5, 6), (2, 2), (3, 2), (-1, None)])
async def test_slices_that_the_prompt_does_not_have(
    store: RequestStore, start: int, stop: int | None
) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    with pytest.raises(StoreError, match="request a: "):
        await store.prompt_ids("a", start, stop)


async def test_slices_of_a_prompt_come_together(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    slices = [(2, 4), (0, 1), (3, 5)]
    found = await store.prompt_slices("a", slices)
    assert [ids.tolist() for ids in found] == [IDS[a:b].tolist() for a, b in slices]
    assert await store.prompt_slices("a", []) == []
    with pytest.raises(StoreError, match="prompt ids"):
        await store.prompt_slices("a", [(0, 2), (4, 10_000)])
    with pytest.raises(StoreError, match="no prompt ids in"):
        await store.prompt_slices("a", [(2, 2)])


async def test_strided_prompts_are_stored_in_order(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=np.arange(10, dtype=np.int32)[::2])
    np.testing.assert_array_equal(await store.prompt_ids("a"), [0, 2, 4, 6, 8])


async def test_a_million_tokens(store: RequestStore) -> None:
    ids = np.arange(1_000_000, dtype=np.int32)
    await store.create("long", spec=b"", prompt_ids=ids)
    np.testing.assert_array_equal(await store.prompt_ids("long", 999_000, 1_000_000), ids[999_000:])
    assert int((await store.prompt_ids("long")).sum(dtype=np.int64)) == 499_999_500_000


async def test_an_id_is_taken_once(store: RequestStore) -> None:
    await store.create("a", spec=b"first", prompt_ids=IDS)
    with pytest.raises(StoreError, match="request a is in the store already"):
        await store.create("a", spec=b"second", prompt_ids=IDS[:1])
    record = await store.get("a")
    assert record is not None and record.spec == b"first"
    np.testing.assert_array_equal(await store.prompt_ids("a"), IDS)


@pytest.mark.parametrize("request_id", ["", "a b", "a{b}", "é", "\ud800", "a\n", "x" * 129])
async def test_malformed_ids_are_refused_and_never_found(
    store: RequestStore, request_id: str
) -> None:
    with pytest.raises(StoreError, match="request id"):
        await store.create(request_id, spec=b"", prompt_ids=IDS)
    assert await store.get(request_id) is None


@pytest.mark.parametrize(
    "ids",
    [
        np.array([], dtype=np.int32),
        np.array([1], dtype=np.int64),
        np.array([[1]], dtype=np.int32),
        np.array([1.0]),
    ],
)
async def test_prompts_of_another_shape_or_type_are_refused(
    store: RequestStore, ids: np.ndarray
) -> None:
    with pytest.raises(StoreError, match="request a: prompt ids are"):
        await store.create("a", spec=b"", prompt_ids=ids)
    assert await store.get("a") is None


async def test_states_and_placement(store: RequestStore) -> None:
    for request_id in ("a", "b"):
        await store.create(request_id, spec=b"", prompt_ids=IDS)
    await store.set_states([])
    await store.set_states(
        [
            StateUpdate(request_id="a", state="prefilling", decode_id="decode-1"),
            StateUpdate(request_id="unknown", state="prefilling"),
            StateUpdate(request_id="b", state="prefilling"),
            StateUpdate(request_id="a", state="decoding", kv_tokens=4096),
        ]
    )
    a, b = await store.get("a"), await store.get("b")
    assert a is not None and (a.state, a.decode_id, a.kv_tokens) == ("decoding", "decode-1", 4096)
    assert b is not None and (b.state, b.decode_id, b.kv_tokens) == ("prefilling", "", 0)
    await store.set_states([StateUpdate(request_id="a", state="queued")])
    a = await store.get("a")
    assert a is not None and a.kv_tokens == 0
    assert await store.get("unknown") is None


async def test_journals_keep_choices_apart_and_in_order(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.create("b", spec=b"", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 5, 6), entry("a", 1, 7), entry("b", 0, 1)])
    await store.append_tokens([])
    await store.append_tokens(
        [
            entry("a", 1, 8, 9, start=1),
            entry("a", 0, start=2),
            entry("a", 0, 2**31 - 1, start=2),
        ]
    )
    assert (await store.journal("a", 0)).tolist() == [5, 6, 2**31 - 1]
    assert (await store.journal("a", 1)).tolist() == [7, 8, 9]
    assert (await store.journal("a", 2)).tolist() == []
    assert (await store.journal("b", 0)).tolist() == [1]
    assert (await store.journal("unknown", 0)).tolist() == []
    assert (await store.journal("a", 0)).dtype == np.int32


async def test_a_journal_has_repeated_tokens_once_and_ends_before_lost_tokens(
    store: RequestStore,
) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 5, 6), entry("a", 0, 5, 6)])
    await store.append_tokens([entry("a", 0, 6, 7, start=1), entry("a", 0, 9, start=4)])
    assert (await store.journal("a", 0)).tolist() == [5, 6, 7]
    await store.append_tokens([entry("a", 0, 8, 9, 10, start=3)])
    assert (await store.journal("a", 0)).tolist() == [5, 6, 7, 8, 9, 10]


async def test_a_journal_is_read_on_from_the_last_read(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    part = await store.journal_after("a", 0, known=0, place=0)
    assert part.token_ids.size == 0
    known = 0
    for tokens in ([1], [2, 3], [], [4]):
        await store.append_tokens([entry("a", 0, *tokens, start=known), entry("a", 1, 7)])
        part = await store.journal_after("a", 0, known=known, place=part.place)
        assert (part.token_ids.tolist(), part.token_ids.dtype) == (tokens, np.int32)
        known += len(tokens)
    part = await store.journal_after("a", 0, known=1, place=0)
    assert part.token_ids.tolist() == [2, 3, 4]


async def test_a_request_is_deleted_by_its_own_spec_alone(store: RequestStore) -> None:
    await store.create("a", spec=b"\x00mine", prompt_ids=IDS)
    assert not await store.delete("a", spec=b"another")
    assert not await store.delete("b", spec=b"\x00mine")
    assert await store.get("a") is not None
    assert await store.delete("a", spec=b"\x00mine")
    assert not await store.delete("a", spec=b"\x00mine")
    assert await store.get("a") is None


async def test_nothing_brings_a_deleted_request_back(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 1)])
    assert await store.delete("a")
    assert not await store.delete("a")
    await store.set_states([StateUpdate(request_id="a", state="decoding", decode_id="decode-1")])
    await store.append_tokens([entry("a", 0, 2)])
    await store.finish({"a": "finished"})
    assert await store.get("a") is None
    assert (await store.journal("a", 0)).size == 0
    with pytest.raises(StoreError):
        await store.prompt_ids("a")
    await store.create("a", spec=b"", prompt_ids=IDS)
    assert (await store.journal("a", 0)).size == 0


async def test_finish_keeps_the_record_and_drops_the_prompt(store: RequestStore) -> None:
    await store.create("a", spec=b"s", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 1)])
    await store.finish({"a": "cancelled"})
    await store.append_tokens([entry("a", 0, 2, start=1)])
    await store.finish({"a": "finished"})
    await store.set_states([StateUpdate(request_id="a", state="decoding")])
    record = await store.get("a")
    assert record is not None and (record.state, record.spec) == ("cancelled", b"s")
    assert (await store.journal("a", 0)).tolist() == [1, 2]
    with pytest.raises(StoreError, match="request a"):
        await store.prompt_ids("a")


async def test_several_requests_finish_together(store: RequestStore) -> None:
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.create("b", spec=b"", prompt_ids=IDS, kept=True)
    await store.finish({"a": "finished", "unknown": "finished", "b": "cancelled"})
    found = [await store.get(one) for one in ("a", "b", "unknown")]
    assert [one and one.state for one in found] == ["finished", "cancelled", None]
    assert (await store.prompt_ids("b")).tolist() == IDS.tolist()


async def test_a_kept_request_keeps_its_prompt_until_it_is_released(store: RequestStore) -> None:
    await store.create("a", spec=b"s", prompt_ids=IDS, kept=True)
    await store.append_tokens([entry("a", 0, 1)])
    await store.finish({"a": "cancelled"})
    await store.set_states([StateUpdate(request_id="a", state="decoding")])
    np.testing.assert_array_equal(await store.prompt_ids("a"), IDS)
    await store.finish({"a": "finished"})
    await store.release("a")
    record = await store.get("a")
    assert record is not None and record.state == "cancelled"
    assert (await store.journal("a", 0)).tolist() == [1]
    with pytest.raises(StoreError, match="request a"):
        await store.prompt_ids("a")
    await store.release("unknown")


async def test_a_kept_request_lives_on_after_its_end(opener: Opener) -> None:
    store = opener(finished_ttl_s=0)
    await store.create("a", spec=b"", prompt_ids=IDS, kept=True)
    await store.finish({"a": "cancelled"})
    assert await store.get("a") is not None
    await store.release("a")
    assert await store.get("a") is None
    with pytest.raises(StoreError):
        await store.prompt_ids("a")


async def test_finished_requests_expire_soon(opener: Opener) -> None:
    store = opener(finished_ttl_s=0.2)
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 1)])
    began_s = time.monotonic()
    await store.finish({"a": "finished"})
    assert await store.get("a") is not None or time.monotonic() - began_s > 0.2
    await asyncio.sleep(0.3)
    await store.append_tokens([entry("a", 0, 2)])
    assert await store.get("a") is None
    assert (await store.journal("a", 0)).size == 0
    await store.create("a", spec=b"", prompt_ids=IDS)


async def test_without_a_life_after_the_end_finish_deletes(opener: Opener) -> None:
    store = opener(finished_ttl_s=0)
    await store.create("a", spec=b"", prompt_ids=IDS)
    await store.append_tokens([entry("a", 0, 1)])
    await store.finish({"a": "finished"})
    assert await store.get("a") is None
    assert (await store.journal("a", 0)).size == 0


async def test_requests_nobody_finishes_expire(opener: Opener) -> None:
    store = opener(ttl_s=1)
    began_s = time.monotonic()
    await store.create("a", spec=b"", prompt_ids=IDS)
    await asyncio.sleep(0.6)
    await store.append_tokens([entry("a", 0, 1)])
    await store.set_states([StateUpdate(request_id="a", state="decoding")])
    assert await store.get("a") is not None or time.monotonic() - began_s > 1.0
    await asyncio.sleep(0.5)
    await store.append_tokens([entry("a", 0, 2)])
    await store.set_states([StateUpdate(request_id="a", state="decoding")])
    assert await store.get("a") is None
    assert (await store.journal("a", 0)).size == 0
    with pytest.raises(StoreError):
        await store.prompt_ids("a")


async def test_a_renewal_prolongs_open_requests_alone(opener: Opener) -> None:
    store = opener(ttl_s=1, finished_ttl_s=1)
    for name in ("ended", "kept"):
        await store.create(name, spec=b"", prompt_ids=IDS, kept=name == "kept")
    await store.finish({"ended": "finished"})
    await asyncio.sleep(0.6)
    await store.renew(["ended", "kept", "unknown"])
    renewed_s = time.monotonic()
    await asyncio.sleep(0.5)
    assert [await store.get(name) for name in ("ended", "unknown")] == [None] * 2
    assert await store.get("kept") is not None or time.monotonic() - renewed_s > 1.0


async def test_a_kept_request_takes_the_place_of_a_kept_one_alone(store: RequestStore) -> None:
    await store.create("a", spec=b"1", prompt_ids=IDS, kept=True)
    await store.append_tokens([entry("a", 0, 1, 2)])
    with pytest.raises(IdTaken):
        await store.create("a", spec=b"2", prompt_ids=IDS)
    await store.create("a", spec=b"3", prompt_ids=IDS[:2], kept=True)
    record = await store.get("a")
    assert record is not None and (record.spec, record.prompt_tokens) == (b"3", 2)
    assert (await store.prompt_ids("a")).tolist() == IDS[:2].tolist()
    assert (await store.journal("a", 0)).size == 0
    await store.create("b", spec=b"1", prompt_ids=IDS)
    await store.finish({"a": "finished"})
    await store.release("a")
    for name in ("a", "b"):
        with pytest.raises(IdTaken):
            await store.create(name, spec=b"4", prompt_ids=IDS, kept=True)


async def test_many_callers_at_once(store: RequestStore) -> None:
    async def live(i: int) -> None:
        request_id = f"r{i}"
        prompt = np.arange(i + 1, dtype=np.int32)
        await store.create(request_id, spec=request_id.encode(), prompt_ids=prompt)
        for token in range(5):
            await store.append_tokens([entry(request_id, 0, i, token, start=2 * token)])
        np.testing.assert_array_equal(await store.prompt_ids(request_id), prompt)
        record = await store.get(request_id)
        assert record is not None and record.spec == request_id.encode()
        assert (await store.journal(request_id, 0)).tolist() == [
            number for token in range(5) for number in (i, token)
        ]
        await (store.finish({request_id: "finished"}) if i % 2 else store.delete(request_id))

    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*(live(i) for i in range(200)))
    records = await asyncio.gather(*(store.get(f"r{i}") for i in range(200)))
    assert [record is not None for record in records] == [i % 2 == 1 for i in range(200)]


async def test_of_rival_creations_one_wins(store: RequestStore) -> None:
    results = await asyncio.gather(
        *(store.create("a", spec=bytes([i]), prompt_ids=IDS) for i in range(20)),
        return_exceptions=True,
    )
    winners = [i for i, result in enumerate(results) if result is None]
    record = await store.get("a")
    assert len(winners) == 1 and record is not None and record.spec == bytes(winners)
    assert all(isinstance(result, StoreError) for result in results if result is not None)


async def test_a_caller_that_gives_up_harms_no_other(store: RequestStore) -> None:
    prompts = {f"r{i}": np.full(50_000, i, dtype=np.int32) for i in range(20)}
    for request_id, prompt in prompts.items():
        await store.create(request_id, spec=b"", prompt_ids=prompt)
    for _ in range(3):
        tasks = [asyncio.create_task(store.prompt_ids(request_id)) for request_id in prompts]
        await asyncio.sleep(0.001)
        for task in tasks[::2]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for prompt, result in list(zip(prompts.values(), results, strict=True))[1::2]:
            np.testing.assert_array_equal(result, prompt)
    for request_id, prompt in prompts.items():
        np.testing.assert_array_equal(await store.prompt_ids(request_id), prompt)


async def test_ping(store: RequestStore) -> None:
    await store.ping()
