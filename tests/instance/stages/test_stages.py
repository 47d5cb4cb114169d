"""Stages as processes: rows go between them over the transport; callers see one engine."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from millrace.bench.common.random_model import write_random_llama
from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.errors import EngineDied
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv_shape import KvShape
from millrace.engine.model.stage import Stage
from millrace.instance.stages.stage_process import Measure, measured_pages
from millrace.instance.stages.stages import open_staged_engine
from millrace.transfer.transport.nixl.transport import NixlTransport
from support.deadlines import HANG_S
from support.kvp_world import check_holds_a_shard
from support.staged import FIVE_LAYERS
from support.tiny_engine import Request, decode, prefill
from support.tiny_models import prompt

LAYERS = FIVE_LAYERS["num_hidden_layers"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    write_random_llama(folder, FIVE_LAYERS)
    return folder


def settings(stages: int, ranks: int = 1, pools: str = "auto") -> EngineConfig:
    return EngineConfig(
        device="cpu",
        stages=stages,
        tensor_parallel=ranks,
        kv_pools=pools,
        kv_bytes=1 << 22,
        max_chunk_tokens=64,
        threads=1,
    )


def assert_ended(pids: Sequence[int]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while any(map(runs, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(runs, pids))


def runs(pid: int) -> bool:
    """Whether the process has not ended; init may reap an orphan late."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_same_answers(engine: Engine, wanted: Engine) -> Request:
    """Compares logits and, where all members share memory, the KV of all layers, as a KV sender
    reads them."""
    assert replace(engine.layout, stages=1) == wanted.layout
    assert engine.max_context_tokens == wanted.max_context_tokens
    both = (engine, wanted)
    requests = [Request(e.runner, prompt(150), room=4) for e in both]
    logits = [prefill(e.runner, r, (60, 100)) for e, r in zip(both, requests, strict=True)]
    assert torch.equal(*logits)
    for _ in range(3):
        for request in requests:
            request.tokens.append(7)
        steps = [decode(e.runner, [r]) for e, r in zip(both, requests, strict=True)]
        assert torch.equal(*steps)
    if engine.members is None:
        assert engine.storage.shape == wanted.storage.shape
        kv = [e.storage.flatten(0, -6)[:, r.pages] for e, r in zip(both, requests, strict=True)]
        assert torch.equal(*kv)
    return requests[0]


def children() -> set[int | None]:
    return {process.pid for process in multiprocessing.active_children()}


def pids_of(others: set[int | None]) -> dict[str, list[int]]:
    """Lists the pids of stages, of their ranks, and of the first stage's ranks. `others`: children
    of this process that were there before.
    """
    found = [child for child in multiprocessing.active_children() if child.pid not in others]
    own = [child.pid for child in found if child.daemon]  # stages have children of their own
    stages = [c.pid for c in sorted(found, key=lambda c: c.name) if not c.daemon]
    servers = [server for pid in stages for server in psutil.Process(pid).children()]
    theirs = [rank.pid for server in servers for rank in server.children()]
    return {"stage 1": stages, "rank of stage 0": own, "rank of stage 1": theirs}


@pytest.mark.parametrize(
    ("stages", "ranks", "pools", "victim", "message"),
    [
        (3, 1, "shared", "stage 1", "stage 1 died, killed by SIGKILL"),
        (2, 2, "own", "rank of stage 1", "stage 1 failed: .*: rank 1 died, killed by SIGKILL"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (2, 2, "shared", "rank of stage 0", "stage 0, .*: rank 1 died, killed by SIGKILL"),
                (2, 2, "shared", "rank of stage 1", "stage 1 failed: .*: rank 1 died"),
                (2, 2, "shared", "stage 1", "stage 1 died, killed by SIGKILL"),
                (3, 1, "own", "stage 1", "stage 1 died, killed by SIGKILL"),
                (2, 2, "own", "rank of stage 0", "stage 0, .*: rank 1 died, killed by SIGKILL"),
            )
        ),
    ],
)
def test_processes_are_one_engine_until_one_dies(
    folder, stages, ranks, pools, victim, message
) -> None:
    torch.set_num_threads(1)
    others = children()
    wanted = open_engine(folder, settings(1, ranks))
    engine = open_staged_engine(str(folder), settings(stages, ranks, pools), "127.0.0.1")
    try:
        request = assert_same_answers(engine, wanted)
        wanted.close()
        pids = pids_of(others)
        assert sum(map(len, pids.values())) == stages * ranks - 1
        os.kill(pids[victim][0], signal.SIGKILL)
        task: PrefillTask = request.task(0, 50)
        begun_s = time.monotonic()
        with pytest.raises(EngineDied, match=message):
            for _ in engine.runner.prefill_batch([task]):
                pass
        assert time.monotonic() - begun_s < 50  # found by its end, not by a timeout
    finally:
        wanted.close()
        engine.close()
    assert_ended([pid for of in pids.values() for pid in of])


def test_the_stage_with_the_least_memory_says_how_many_pages_there_are(folder, monkeypatch) -> None:
    """Two of five layers lie at the first stage. On GPUs each member counts for its own device."""
    one_page = KvShape.of_one_page(
        str(folder), settings(2, pools="own"), torch.device("cpu")
    ).layout
    ask = Measure(
        config=EngineConfig(device="cuda", stages=2),
        one_page=one_page,
        least_bytes=0,
        sharers=(1, 3),
    )
    room = 600 * one_page.page_bytes
    monkeypatch.setattr("millrace.engine.sizing.pool_bytes", lambda *_: room)
    found = [measured_pages(ask, Stage(i, 2), torch.device("cuda", i), None) for i in range(2)]
    assert found == [600 // 2, 600 // 3 // 3]
    assert measured_pages(ask, Stage(1, 2), torch.device("cpu"), None) == 600 // 5


def test_a_stage_without_room_for_its_pool_ends_the_start_by_name(folder) -> None:
    with pytest.raises(
        ConfigError, match=r"engine\.kv_bytes is 4000; one page of this model takes"
    ):
        open_staged_engine(
            str(folder), replace(settings(2, pools="own"), kv_bytes=4000), "127.0.0.1"
        )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_with_pools_of_their_own_attend_for_an_owner(folder, ranks) -> None:
    torch.set_num_threads(1)
    engine = open_staged_engine(str(folder), settings(2, ranks, "own"), "127.0.0.1")
    try:
        assert engine.members is not None
        check_holds_a_shard(folder, engine.runner, engine.members.shards)
    finally:
        engine.close()


def altered(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("there", "stage 1 failed: StageError: activations of stages-.*-0 came with another"),
        pytest.param(
            *("back", "^activations of stages-.*-1 came with another checksum than was sent"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_altered_activations_end_the_instance(folder, monkeypatch, way, message) -> None:
    torch.set_num_threads(1)
    notify, subscribe = NixlTransport.notify, NixlTransport.subscribe
    alters = threading.Event()  # of this process alone

    def notify_altered(transport, peer, payload, **more):
        is_altered = way == "there" and alters.is_set()
        return notify(transport, peer, altered(payload) if is_altered else payload, **more)

    def subscribe_altered(transport, channel, handler):
        def take(peer, payload):
            is_altered = way == "back" and alters.is_set()
            handler(peer, altered(payload) if is_altered else payload)

        subscribe(transport, channel, take)

    monkeypatch.setattr(NixlTransport, "notify", notify_altered)
    monkeypatch.setattr(NixlTransport, "subscribe", subscribe_altered)
    others = children()
    engine = open_staged_engine(str(folder), settings(2, 1), "127.0.0.1", checksums=True)
    try:
        request = Request(engine.runner, prompt(100))
        for _ in engine.runner.prefill_batch([request.task(0, 50)]):
            pass
        alters.set()
        task = request.task(50, 100)
        with pytest.raises(EngineDied, match=message):
            for boundary in engine.runner.prefill_batch([task]):
                if boundary.awaited is not None:
                    boundary.awaited.wait()
    finally:
        engine.close()
    assert not pids_of(others)["stage 1"]


OPENED = """
import os, signal, sys

import psutil

from millrace.core.config import EngineConfig
from millrace.instance.stages.stages import open_staged_engine

if __name__ == "__main__":
    config = EngineConfig(device="cpu", stages=2, tensor_parallel=2, kv_bytes=1 << 22, threads=1)
    engine = open_staged_engine(sys.argv[1], config, "127.0.0.1")
    print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["killed", "leaves without closing"])
def test_nobody_outlives_the_first_stage(folder, tmp_path, end) -> None:
    script = tmp_path / "opened.py"
    script.write_text(OPENED)
    run = subprocess.run(
        [sys.executable, str(script), str(folder), end],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert run.returncode == (-signal.SIGKILL if end == "killed" else 0), run.stderr
    pids = [int(pid) for pid in run.stdout.splitlines()[-1].split()]
    assert len(pids) >= 3
    assert_ended(pids)


@pytest.mark.parametrize(
    ("stages", "ranks", "message"),
    [
        (LAYERS + 1, 1, f"engine.stages is {LAYERS + 1}; the model's {LAYERS} layers"),
        (2, 3, "tensor parallelism of 3 does not divide num_key_value_heads, which is 2"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_name(folder, stages, ranks, message) -> None:
    with pytest.raises(ConfigError, match=message):
        open_staged_engine(str(folder), settings(stages, ranks), "127.0.0.1")
