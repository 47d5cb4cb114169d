"""A recorded live run gives the same decisions when the simulator's driver replays it."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from pathlib import Path

import httpx
import pytest
from typer import Typer
from typer.testing import CliRunner

from millrace.cli.sim.replay_command import command
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.recording import RecordingError
from millrace.event_lines import event_lines
from millrace.local.options import StackOptions
from millrace.local.processes.service import Service
from millrace.local.stack import Stack
from millrace.sim.replay import replay
from millrace.wire.pb import scheduler_pb2
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, eventually, greedy_ids
from support.scheduler_peers import Net, Worker, quick, scheduler, spec
from support.served_model import served_folder
from support.tiny_models import prompt


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def events(path: Path) -> set[str]:
    return {kind_of(line) for line in lines(path)[1:]}


def kind_of(line) -> str:
    """Returns the name of the event of a step, or of the report in it."""
    name, fields = line["event"]
    return fields["report"][0] if name == "Reported" else name


def effects(path: Path) -> set[str]:
    return {name for line in lines(path)[1:] for name, _ in line["effects"]}


# ---- the real service, with peers over real streams


async def work(net: Net, prefill: Worker, decodes: dict[str, Worker], computed: set[str]) -> None:
    """Runs a prefill worker and the decode workers that its requests go to."""
    while True:
        command = await prefill.next()
        if command.WhichOneof("kind") != "run_prefill":
            continue
        request_id = command.run_prefill.request.request_id
        computed.add(request_id)
        await prefill.computed(request_id)
        await prefill.released(request_id)
        decode = decodes.get(command.run_prefill.decode.incarnation.id)
        if decode is not None:  # else it died after the request was placed there
            await decode.decoding(request_id)
            await decode.finished(request_id)


async def let_go(decode: Worker) -> None:
    """Frees what a decode worker must drop, as a real worker does: other requests need it."""
    attempts: dict[str, int] = {}
    while True:
        command = await decode.next()
        if command.WhichOneof("kind") == "admit_decode":
            admit = command.admit_decode
            attempts[admit.request.request_id] = admit.attempt
        elif command.WhichOneof("kind") == "cancel":
            request_id = command.cancel.request_id
            await decode.released(request_id, attempts[request_id])


async def run(path: Path) -> None:
    """Runs a dozen requests, one cancel, one death of a prefill and one of a decode instance."""
    async with scheduler(quick(), record=path) as net:
        lost, prefill = await net.worker("p0"), await net.worker("p1")
        decodes = {name: await net.worker(name) for name in ("d0", "d1", "d2")}
        proxy = await net.proxy()
        await proxy.submit(*(spec(f"r{i}", 50 + 90 * i) for i in range(12)), spec("big", 5000))
        for _ in range(3):
            await proxy.next("placed")
        await proxy.cancel("r7")
        await lost.next("run_prefill")
        await lost.cut()
        await decodes.pop("d2").cut()
        for policy in ("s_edf", "lars"):
            await net.stub().SetPolicy(scheduler_pb2.SetPolicyRequest(policy=policy))
        computed: set[str] = set()
        working = [asyncio.create_task(work(net, prefill, decodes, computed))]
        working += [asyncio.create_task(let_go(decode)) for decode in decodes.values()]

        async def ended() -> bool:
            for task in working:
                if task.done():
                    await task  # raises what went wrong in it
            status = await net.status()
            return not (status.queued or status.prefilling or status.decoding)

        await eventually(ended)
        for task in working:
            task.cancel()
        await asyncio.gather(*working, return_exceptions=True)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("live") / "run.jsonl"
    asyncio.run(run(path))
    return path


def test_a_live_run_takes_the_same_decisions_when_it_is_replayed(recording):
    result = replay(recording)
    assert result.agrees and not result.cut, result.difference
    assert result.steps == len(lines(recording)) - 1 > 50
    assert result.effects == sum(len(line["effects"]) for line in lines(recording)[1:])
    assert result.duration_s > 0
    assert {"Submitted", "CancelRequested", "InstanceLeft", "ChunkFinished"} <= events(recording)
    assert "PolicyChanged" in events(recording)
    assert {"Place", "Refuse", "RunPrefill", "CancelOn", "Record"} <= effects(recording)


def tampered(recording: Path, change) -> tuple[Path, int]:
    """Writes a copy with `change` made to the first step for which it returns True; returns its
    line.
    """
    all_lines = lines(recording)
    number = next(i for i, line in enumerate(all_lines[1:], 2) if change(line))
    path = recording.with_name(f"{change.__name__}.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in all_lines))
    return path, number


def another_instance(line) -> bool:
    for name, fields in line["effects"]:
        if name == "RunPrefill":
            fields["instance_id"] = "p9"
            return True
    return False


def one_effect_less(line) -> bool:
    return len(line["effects"]) > 1 and bool(line["effects"].pop())


def another_order(line) -> bool:
    same = line["effects"] == line["effects"][::-1]
    line["effects"].reverse()
    return not same


def a_defect(line) -> bool:
    if not line["effects"]:
        return False
    line["raised"] = "IntegrityError: a leak"
    return True


@pytest.mark.parametrize("change", [another_instance, one_effect_less, another_order, a_defect])
def test_the_first_step_that_differs_is_shown(recording, change):
    path, number = tampered(recording, change)
    result = replay(path)
    assert not result.agrees
    assert result.difference.line == number and result.steps == number - 1
    assert result.difference.event == lines(recording)[number - 1]["event"]
    assert result.difference.replayed == lines(recording)[number - 1]["effects"]
    assert result.difference.recorded != result.difference.replayed
    assert f"line {number}, at " in str(result.difference)


def test_an_event_that_is_missing_changes_what_follows(recording):
    kept = [line for line in lines(recording) if line.get("event", [""])[0] != "CancelRequested"]
    path = recording.with_name("kept.jsonl")
    path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert not replay(path).agrees


def test_a_machine_that_decides_otherwise_is_caught(recording):
    """The parity test must find this: the order of two equal choices turned round."""

    def build(config):
        machine = Machine(config)

        def step(event, now_s):
            found = machine.step(event, now_s)
            return found[::-1]

        return step

    result = replay(recording, build)
    assert not result.agrees and "  - " in str(result.difference)


def test_a_machine_that_raises_is_a_difference(recording):
    def step(event, now_s):
        raise ZeroDivisionError("a defect")

    result = replay(recording, lambda config: step)
    assert result.difference.replayed == [["raised", "ZeroDivisionError: a defect"]]
    assert "+ raised: ZeroDivisionError: a defect" in str(result.difference)


def test_a_recording_that_was_cut_short_is_replayed_up_to_there(recording):
    path = recording.with_name("cut.jsonl")
    path.write_bytes(recording.read_bytes()[:-5])
    result = replay(path)
    assert result.agrees and result.cut and result.steps == len(lines(recording)) - 2


def test_a_packed_recording_is_read_like_a_plain_one(recording):
    path = recording.with_name("run.jsonl.gz")
    path.write_bytes(gzip.compress(recording.read_bytes()))
    assert replay(path) == replay(recording)
    path.write_bytes(gzip.compress(recording.read_bytes())[:-20])
    with pytest.raises(RecordingError, match=r"run\.jsonl\.gz"):
        replay(path)


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "its first line has no millrace_recording"),
        ('{"millrace_recording":7}\n', "millrace_recording is 7; this version reads 3"),
        ("[]\n", "line 1: it must be an object"),
        ("{\n", "line 1: "),
        ('{"millrace_recording":3,"scheduler":{}}\n{"now_s":1}\n', "line 2: no step: KeyError"),
        (
            '{"millrace_recording":3,"scheduler":{}}\n{"now_s":1,"event":["X",{}],"effects":[]}\n',
            r"line 2: \['X', {}\] is no event",
        ),
    ],
)
def test_what_is_no_recording_is_said(tmp_path, text, message):
    path = tmp_path / "run.jsonl"
    path.write_text(text)
    with pytest.raises(RecordingError, match=message):
        replay(path)
    with pytest.raises(RecordingError, match=r"missing\.jsonl"):
        replay(tmp_path / "missing.jsonl")


def test_the_command_reports_and_fails_on_a_difference(recording, tmp_path):
    app = Typer()
    app.command()(command)
    out = tmp_path / "result.json"
    good = CliRunner().invoke(app, [str(recording), "--json", str(out)])
    assert good.exit_code == 0 and "effects agree" in good.output
    assert json.loads(out.read_text())["agrees"] is True
    path, number = tampered(recording, another_instance)
    bad = CliRunner().invoke(app, [str(path), "--json", str(out)])
    assert bad.exit_code == 1 and f"line {number}, at" in bad.output
    assert json.loads(out.read_text())["difference"]["line"] == number
    none = CliRunner().invoke(app, [str(tmp_path / "none.jsonl")])
    assert none.exit_code == 2  # what is said: tests/cli/test_files.py


# ---- the whole stack, with real workers


class RecordedStack(Stack):
    """A stack whose scheduler records."""

    record: Path

    def service(self, name: str, arguments: list[str]) -> Service:
        if name == "scheduler":
            arguments += ["--record", str(self.record)]
        return super().service(name, arguments)


async def test_real_workers_and_a_death_replay_alike(tmp_path) -> None:
    """The scheduler ran in another process, with another hash seed and clock."""
    settings = [
        "engine.dtype=float32",
        "engine.max_chunk_tokens=64",
        f"engine.kv_bytes={POOL_BYTES}",
    ]
    options = StackOptions(
        model=str(served_folder("qwen3")),
        model_name="tiny",
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[
            *settings,
            "scheduler.heartbeat_s=0.2",
            "scheduler.lease_s=1.0",
        ],
    )
    recorded = RecordedStack(options)
    recorded.record = path = tmp_path / "run.jsonl"
    async with (
        recorded as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        ids = [prompt(length, length) for length in (1500, 40, 900, 1500, 7, 300)]
        answers = [asyncio.create_task(greedy_ids(client, p, 8)) for p in ids]
        body = {"model": "tiny", "prompt": [9], "max_tokens": 4000, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as s:
            await anext(event_lines(s))  # then the client leaves
        process = stack.services["prefill-0"].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        ends = await asyncio.gather(*answers, return_exceptions=True)
        assert any(isinstance(end, list) for end in ends)  # a late death costs a request
        lost = stack.services["prefill-0"]
        await eventually(lambda: lost.restarts == 1 and lost.serving)
        await eventually(lambda: {"InstanceLeft", "CancelRequested"} <= events_so_far(path))
    result = replay(path)
    assert result.agrees and not result.cut, str(result.difference)
    assert {"Submitted", "ChunkFinished", "RequestReleased", "DecodeStarted"} <= events(path)


def events_so_far(path: Path) -> set[str]:
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return {kind_of(json.loads(line)) for line in whole[1:]}
