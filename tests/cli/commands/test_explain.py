"""`millrace explain` with a running scheduler, as a user types it."""

from __future__ import annotations

import json
import re

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import reports
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.observe.recording import Recording
from support.command import millrace
from support.core_events import instance, reported, request
from support.scheduler_peers import scheduler, spec


async def test_it_says_why_a_request_waits_and_writes_it_as_json(tmp_path) -> None:
    path = tmp_path / "explained.json"
    async with scheduler() as net:
        for name in ("p0", "d0"):
            await net.worker(name)
        proxy = await net.proxy()
        await proxy.submit(spec("first", 100))
        await proxy.next("placed")
        status, shown = await millrace(
            "explain", "first", "--scheduler", net.address, "--json", str(path)
        )
        unknown, said = await millrace("explain", "nobody", "--scheduler", net.address)
    assert status == 0
    assert shown.startswith("request      first, prefilling, class default\n")
    assert re.search(r"\norder        millrace, (late|due): to be done ", shown)
    assert "\nwaits for    p0 to begin it\n" in shown
    written = json.loads(path.read_text())
    assert written["request_id"] == "first" and written["part"] in {"late", "due"}
    assert {one["reason"] for one in written["waited"]} <= {
        "room at a decode instance",
        "a prefill instance",
        "its turn at its instances",
    }
    assert unknown == 1
    assert said == "millrace: no request 'nobody' is known, or no longer\n"


async def test_a_request_of_a_recorded_run_is_explained_moment_by_moment(tmp_path) -> None:
    path, out = tmp_path / "run.jsonl", tmp_path / "explained.json"
    config = SchedulerConfig(policy="edf", tasks_ahead=1, batch_tokens=0)
    recording = Recording(path, config)
    step = recording.around(Machine(config).step)
    for now_s, event in (
        (0.0, instance("p0")),
        (0.0, instance("d0")),
        (1.0, request("first", 1000, arrival_s=1.0, ttft_s=9.0)),
        (1.0, request("late", 100, arrival_s=1.0, ttft_s=20.0)),
        (1.1, reported("p0", reports.ChunkStarted(request_id="first"))),
        (2.1, reported("p0", reports.ChunkFinished(request_id="first", last=True, compute_s=1.0))),
        (2.2, reported("p0", reports.ChunkStarted(request_id="late"))),
        (2.5, reported("p0", reports.ChunkFinished(request_id="late", last=True, compute_s=0.3))),
        (2.5, reported("d0", reports.DecodeStarted(request_id="late"))),
    ):
        step(event, now_s)
    recording.close()
    status, shown = await millrace("explain", "late", "--recording", str(path), "--json", str(out))
    assert status == 0, shown
    moments = json.loads(out.read_text())["moments"]
    assert [one["when"] for one in moments] == [
        "when it came",
        "before its plan",
        "at its first token",
    ]
    came, planned, token = (one["explanation"] for one in moments)
    [ahead] = came["before"]
    assert ahead["request_id"] == "first" and ahead["key"] == "deadline in 9 s"
    assert planned["before"] == [] or planned["before"][0]["request_id"] == "first"
    assert token["first_token_s"] == 1.5
    assert "-- at its first token, 1.5 s after its arrival" in shown
    assert "would help   an idle prefill instance" in shown
    status, said = await millrace("explain", "nobody", "--recording", str(path))
    assert status == 1 and "has no request 'nobody'" in said
