"""Batches of one process and of several, over the same stores: progress, deaths, ends."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from millrace.core.config import StoreConfig
from millrace.proxy.batches.lines import Answer, answer_of
from millrace.proxy.errors import NO_RETRY, ApiError
from millrace.state.store import StoreError
from support.batches import (
    CHAT,
    Endpoint,
    answer,
    create,
    ended,
    files_on,
    line,
    lines,
    process,
    quick_batches,
    until,
)
from support.stores import private_redis

__all__ = ["quick_batches"]
pytestmark = pytest.mark.usefixtures("quick_batches")


@pytest.fixture(params=["memory", "redis"])
async def world(request, tmp_path):
    if request.param == "memory":
        async with files_on(StoreConfig(), str(tmp_path)) as made:
            yield made
        return
    async with private_redis() as url, files_on(StoreConfig(url=url), str(tmp_path)) as made:
        yield made


@pytest.fixture
async def memory(tmp_path):
    async with files_on(StoreConfig(), str(tmp_path)) as made:
        yield made


def ids(rows):
    return [row["custom_id"] for row in rows]


async def test_every_request_has_one_line(world):
    endpoint = Endpoint()
    one = process(world, endpoint, "one")
    one.start()
    made = await create(one, await world.upload(lines(50)), metadata={"a": "b"})
    assert made.document()["status"] == "validating"
    found = await until(one, made.id, ended)
    document = found.document()
    assert document["status"] == "completed"
    assert document["request_counts"] == {"total": 50, "completed": 50, "failed": 0}
    assert (document["usage"]["input_tokens"], document["usage"]["total_tokens"]) == (150, 250)
    assert (document["model"], document["metadata"]) == ("tiny", {"a": "b"})
    assert document["error_file_id"] is None
    rows = await world.read(found.output_file_id)
    assert sorted(ids(rows)) == sorted(f"r{i}" for i in range(50))
    assert len({row["id"] for row in rows}) == 50
    [first] = [row for row in rows if row["custom_id"] == "r7"]
    assert first["error"] is None
    assert first["response"]["status_code"] == 200
    assert first["response"]["request_id"] == "id-r7"
    assert first["response"]["body"]["said"] == "r7"
    await one.close()


async def test_failed_requests_go_to_the_error_file(memory):
    endpoint = Endpoint(says=lambda r: answer(r, 400 if r.custom_id in ("r1", "r3") else 200))
    one = process(memory, endpoint, "one")
    one.start()
    made = await create(one, await memory.upload(lines(5)))
    found = await until(one, made.id, ended)
    assert (found.status, found.completed, found.failed) == ("completed", 3, 2)
    assert sorted(ids(await memory.read(found.output_file_id))) == ["r0", "r2", "r4"]
    rows = await memory.read(found.error_file_id)
    assert sorted(ids(rows)) == ["r1", "r3"]
    assert all(row["response"]["status_code"] == 400 for row in rows)
    await one.close()


async def test_a_fleet_that_refuses_is_asked_again(memory):
    refusals = [429, 503]

    def says(request):
        return answer(request, refusals.pop() if refusals else 200)

    endpoint = Endpoint(says=says)
    one = process(memory, endpoint, "one")
    one.start()
    made = await create(one, await memory.upload(lines(1)))
    found = await until(one, made.id, ended)
    assert (found.completed, found.failed) == (1, 0)
    assert endpoint.asked == ["r0"] * 3
    await one.close()


async def test_requests_in_flight_are_bounded(memory):
    endpoint = Endpoint(held={f"r{i}" for i in range(20)})
    one = process(memory, endpoint, "one", max_inflight=4)
    one.start()
    made = await create(one, await memory.upload(lines(20)))
    await until(one, made.id, lambda b: b.status == "in_progress" and len(endpoint.asked) == 4)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(endpoint.asked) == 4
    await one.close()


async def test_another_process_goes_on_after_a_death_without_a_line_twice(world):
    """Process one stops renewing while requests run: its lease is over, two takes the batch."""
    held = Endpoint(held={f"r{i}" for i in range(10, 30)})
    one = process(world, held, "one", lease_s=0.2)
    one.start()
    made = await create(one, await world.upload(lines(30)))
    await until(one, made.id, lambda b: b.completed == 10)
    halted = asyncio.Event()
    renew = world.batch_records.renew

    async def no_renewal(record_id, owner, lease_s):
        if owner == "one":  # the process has died for the store
            await halted.wait()
        return await renew(record_id, owner, lease_s)

    world.batch_records.renew = no_renewal
    endpoint = Endpoint()
    two = process(world, endpoint, "two", lease_s=60.0)
    two.start()
    found = await until(two, made.id, ended)
    assert (found.status, found.completed) == ("completed", 30)
    rows = await world.read(found.output_file_id)
    assert sorted(ids(rows)) == sorted(f"r{i}" for i in range(30))
    assert set(endpoint.asked) == {f"r{i}" for i in range(10, 30)}
    halted.set()
    await one.close()
    assert (await two.find(made.id, "acme")) == found  # what the dead one does changes nothing
    await two.close()


async def test_a_death_between_writing_and_recording_repeats_lines_but_no_result(world):
    """The blob with the first results is written, its record is not."""
    endpoint = Endpoint()
    one = process(world, endpoint, "one", lease_s=0.2)
    swap = world.batch_records.swap
    died = asyncio.Event()

    async def swap_until_death(old, body, *, final=False):
        if b'"completed":0' not in body and old.owner == "one":
            died.set()
            await asyncio.get_running_loop().create_future()
        return await swap(old, body, final=final)

    world.batch_records.swap = swap_until_death
    one.start()
    made = await create(one, await world.upload(lines(5)))
    await died.wait()
    assert (await one.find(made.id, "acme")).completed == 0
    renew = world.batch_records.renew
    world.batch_records.renew = lambda *a: asyncio.sleep(0, False) if a[1] == "one" else renew(*a)
    again = Endpoint()
    two = process(world, again, "two")
    two.start()
    found = await until(two, made.id, ended)
    assert sorted(ids(await world.read(found.output_file_id))) == [f"r{i}" for i in range(5)]
    assert sorted(again.asked) == [f"r{i}" for i in range(5)]
    assert endpoint.asked and set(endpoint.asked) <= set(again.asked)
    await two.close()
    await one.close()


async def test_a_process_that_closes_gives_its_batch_back_at_once(world):
    held = Endpoint(held={"r3", "r4"})
    one = process(world, held, "one", lease_s=600.0)
    one.start()
    made = await create(one, await world.upload(lines(5)))
    await until(one, made.id, lambda b: b.completed == 3)
    endpoint = Endpoint()
    two = process(world, endpoint, "two")
    two.start()
    await one.close()
    assert sorted(held.cancelled) == ["r3", "r4"]
    found = await until(two, made.id, ended)
    assert (found.status, found.completed) == ("completed", 5)
    assert sorted(endpoint.asked) == ["r3", "r4"]
    assert len(await world.read(found.output_file_id)) == 5
    await two.close()


async def test_cancel_ends_running_requests_and_keeps_what_is_done(world):
    endpoint = Endpoint(held={"r3", "r4"})
    one = process(world, endpoint, "one")
    one.start()
    made = await create(one, await world.upload(lines(5)))
    await until(one, made.id, lambda b: b.completed == 3)
    elsewhere = process(world, Endpoint(), "two", max_running=0)
    assert (await elsewhere.cancel(made.id, "acme")).status == "cancelling"
    assert (await elsewhere.cancel(made.id, "acme")).status == "cancelling"
    found = await until(elsewhere, made.id, ended)
    assert (found.status, found.completed) == ("cancelled", 3)
    assert found.document()["cancelling_at"] and found.document()["cancelled_at"]
    assert sorted(endpoint.cancelled) == ["r3", "r4"]
    assert sorted(ids(await world.read(found.output_file_id))) == ["r0", "r1", "r2"]
    with pytest.raises(ApiError, match="status 'cancelled'"):
        await elsewhere.cancel(made.id, "acme")
    await one.close()


async def test_a_batch_that_nobody_runs_is_cancelled_at_once(memory):
    one = process(memory, Endpoint(), "one")
    made = await create(one, await memory.upload(lines(5)))
    assert (await one.cancel(made.id, "acme")).status == "cancelled"
    assert await memory.batch_records.claimable(10) == []


async def test_after_the_window_the_rest_expires(world):
    endpoint = Endpoint(held={"r3", "r4"})
    one = process(world, endpoint, "one")
    one.start()
    made = await create(one, await world.upload(lines(6)), "1h")
    await until(one, made.id, lambda b: b.completed == 4)
    world.now_s += 3600.0
    found = await until(one, made.id, ended)
    assert (found.status, found.completed, found.failed) == ("expired", 4, 2)
    assert sorted(ids(await world.read(found.output_file_id))) == ["r0", "r1", "r2", "r5"]
    rows = await world.read(found.error_file_id)
    assert sorted(ids(rows)) == ["r3", "r4"]
    assert {row["error"]["code"] for row in rows} == {"batch_expired"}
    assert all(row["response"] is None for row in rows)
    await one.close()


@pytest.mark.parametrize(
    ("content", "number", "code"),
    [
        (line("a") + b"\n" + b"{\n" + line("b"), 3, "invalid_json_line"),
        (line("a") + line("b") + line("a"), 3, "duplicate_custom_id"),
        (line("a") + line("b").replace(b'"b"', rb'"\ud83d"'), 2, "invalid_custom_id"),
        (line("a", url="/v1/completions"), 1, "invalid_url"),
        (line("a", body={"model": "other"}), 1, "model_not_found"),
        (line("a") + line("b", body={"model": "other"}), 2, "model_not_found"),
        (lines(9), 9, "too_many_tasks"),
        (b"\n\n", None, "empty_file"),
        (line("a") + line("b", "x" * (2 << 20)), 2, "line_too_long"),
    ],
)
async def test_a_wrong_input_fails_the_batch_and_names_the_line(memory, content, number, code):
    endpoint = Endpoint()
    one = process(memory, endpoint, "one", max_lines=8)
    one.start()
    made = await create(one, await memory.upload(content))
    found = await until(one, made.id, ended)
    assert found.status == "failed"
    [error] = found.document()["errors"]["data"]
    assert (error["line"], error["code"]) == (number, code)
    assert endpoint.asked == []
    await one.close()


async def test_an_input_that_is_deleted_before_it_is_read_fails_the_batch(memory):
    one = process(memory, Endpoint(), "one")
    file_id = await memory.upload(lines(3))
    made = await create(one, file_id)
    await memory.files.delete(file_id, "acme")
    one.start()
    found = await until(one, made.id, ended)
    assert found.status == "failed"
    assert found.errors[0]["code"] == "input_file_gone"
    with pytest.raises(ApiError) as caught:
        await create(one, file_id)
    assert (caught.value.status, caught.value.param) == (404, "input_file_id")
    await one.close()


async def test_a_batch_belongs_to_its_tenant(memory):
    one = process(memory, Endpoint(), "one")
    made = await create(one, await memory.upload(lines(1)))
    with pytest.raises(ApiError) as caught:
        await one.find(made.id, "other")
    assert caught.value.status == 404
    stranger = await memory.upload(lines(1), "other")
    with pytest.raises(ApiError):
        await create(one, stranger)


async def test_a_file_of_another_size_or_purpose_is_refused(memory):
    one = process(memory, Endpoint(), "one", max_input_bytes=200)
    with pytest.raises(ApiError, match="a batch may have 200") as caught:
        await create(one, await memory.upload(lines(50)))
    assert (caught.value.status, caught.value.code) == (400, "file_too_large")
    with pytest.raises(ApiError) as caught:
        await create(one, await memory.upload(b""))
    assert caught.value.code == "empty_file"


async def test_a_request_that_always_breaks_the_fleet_ends_as_failed(memory):
    endpoint = Endpoint(says=lambda r: Answer(status=503, request_id=None, body=b"{}"))
    one = process(memory, endpoint, "one")
    one.start()
    made = await create(one, await memory.upload(lines(1)))
    found = await until(one, made.id, ended)
    assert (found.status, found.failed) == ("completed", 1)
    assert found.endpoint == CHAT
    await one.close()


async def test_a_store_that_fails_while_results_are_written_loses_none(memory, monkeypatch):
    """The first blob of results can't be written: its lines run again when the lease is over."""
    endpoint = Endpoint()
    one = process(memory, endpoint, "one", lease_s=0.2)
    blob, broken = memory.files.blob, ["once"]

    def failing(lifetime_s):
        if broken:
            broken.pop()
            raise StoreError("no space left")
        return blob(lifetime_s)

    made = await create(one, await memory.upload(lines(6)))
    monkeypatch.setattr(memory.files, "blob", failing)
    one.start()
    found = await until(one, made.id, ended)
    assert (found.status, found.completed, broken) == ("completed", 6, [])
    assert sorted(ids(await memory.read(found.output_file_id))) == [f"r{i}" for i in range(6)]
    assert min(Counter(endpoint.asked).values()) > 1  # a busy machine loses the lease again
    await one.close()


async def test_a_request_that_no_limit_ever_lets_pass_is_not_sent_again(memory):
    refusal = ApiError(429, "larger than the limit", headers=[NO_RETRY])
    endpoint = Endpoint(says=lambda r: answer_of(refusal, refusal.body()))
    one = process(memory, endpoint, "one")
    one.start()
    made = await create(one, await memory.upload(lines(1)))
    found = await until(one, made.id, ended)
    assert (found.status, found.failed, endpoint.asked) == ("completed", 1, ["r0"])
    [row] = await memory.read(found.error_file_id)
    assert row["response"]["status_code"] == 429
    await one.close()
