"""`millrace fleet` with a running scheduler, as a user types it."""

from __future__ import annotations

import json

from millrace.wire.clients.scheduler_client import get_instances, set_cordon
from millrace.wire.pb import scheduler_pb2
from support.command import millrace
from support.live_stack import eventually
from support.scheduler_peers import quick, scheduler, spec


async def test_it_shows_instances_and_signals_and_writes_both_as_json(tmp_path) -> None:
    path = tmp_path / "fleet.json"
    async with scheduler() as net:
        for name in ("p0", "p1", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await proxy.next("placed")
        await set_cordon(net.address, "p1", True)
        status, shown = await millrace("fleet", "--scheduler", net.address, "--json", str(path))
    assert status == 0
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["d0"] == ["decode", "yes", "1", "0", "1", "8", "of", "100"]
    assert rows["p1"] == ["prefill", "no", "1", "0", "0", "0", "of", "100"]
    *counts, arriving, _, _, _ = rows["prefill"]
    assert counts == ["1", "1", "1", "0.1"] and 0.0 < float(arriving) <= 0.02
    assert rows["decode"] == ["1", "0", "1", "-", "-", "-", "0.08", "-"]
    assert shown.endswith("0 requests are parked at the proxies\n")
    written = json.loads(path.read_text())
    assert {one["id"]: one["draining"] for one in written["instances"]} == {
        "p0": False,
        "p1": True,
        "d0": False,
    }
    assert written["pools"]["decode"]["kv_utilisation"] == 0.08
    assert written["parked_requests"] == 0


async def test_it_shows_the_instances_that_fail_their_requests() -> None:
    async with scheduler(quick(breaker_errors=1, breaker_pause_s=3600.0)) as net:
        worker = await net.worker("p0")
        for name in ("p1", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await proxy.next("placed")
        await worker.next("run_prefill")
        await worker.say(
            request_failed=scheduler_pb2.RequestFailed(
                request_id="r", message="no luck", fault=scheduler_pb2.FAULT_COMPUTE
            )
        )
        await proxy.next("failed")
        narrow = {"COLUMNS": "80"}
        status, shown = await millrace("fleet", "--scheduler", net.address, environment=narrow)
    assert status == 0
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "no: errors" in rows["p0"]
    assert "…" not in shown and "draining" in shown
    assert "yes" in rows["p1"]


async def test_it_shows_the_instances_that_lag() -> None:
    """A prompt that is expected to take 0.1 s is computed for longer than three times that."""
    async with scheduler(quick(heartbeat_s=0.02)) as net:
        worker = await net.worker("p0")
        for name in ("p1", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await proxy.next("placed")
        await worker.next("run_prefill")
        started = scheduler_pb2.ChunkStarted(request_id="r", chunk_index=0)
        await worker.say(chunk_started=started)
        views = {}

        async def lags() -> bool:
            views.update({one.id: one for one in await get_instances(net.address)})
            return views["p0"].slowness != "closed"

        await eventually(lags)
        status, shown = await millrace("fleet", "--scheduler", net.address)
    assert status == 0
    assert {name: one.slowness for name, one in views.items()} == {
        "p0": "open",
        "p1": "closed",
        "d0": "closed",
    }
    rows = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert "no: slow" in rows["p0"] and "yes" in rows["p1"]


async def test_without_a_scheduler_it_says_so_in_one_line() -> None:
    async with scheduler() as net:
        address = net.address
    status, said = await millrace("fleet", "--scheduler", address)
    assert status == 1 and said.startswith(f"millrace: no scheduler at {address}: ")
    assert said.count("\n") == 1
