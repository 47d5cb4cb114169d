"""What a host of stages refuses, and says of it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from millrace.core.config import TlsConfig
from millrace.engine.model.loader import model_hash
from millrace.engine.model.stage import Stage
from millrace.instance.stages.remote.codec import encode
from millrace.instance.stages.remote.servicer import StageHostServicer, StageRoom
from millrace.instance.stages.stage_process import StagePlace
from millrace.version import version
from millrace.wire.clients import stage_stream
from millrace.wire.clients.stage_stream import BeginStage, StageStream
from millrace.wire.server import bind, create_server
from millrace.wire.tls import use_tls
from support.certificates import Authority, needs_openssl
from support.deadlines import HANG_S
from support.tiny_models import model_folder

PLACE = StagePlace(
    name="stages-x-1",
    host="10.0.0.1",
    devices=("10.0.0.2:7/cpu",),
    threads=1,
    max_rows=64,
    timeout_s=2 * HANG_S,
    checksums=False,
)


@pytest.fixture(scope="module")
def folder() -> Path:
    return model_folder("llama")


def begin(folder: Path, **more: object) -> BeginStage:
    made = BeginStage(
        instance="prefill-0",
        model_hash=model_hash(folder) + "@a-revision",
        load_format="auto",
        place=encode(PLACE),
        beside=(),
    )
    return replace(made, **more)  # type: ignore[arg-type]


class Stream:
    """A `StageStream` that the test reads."""

    def __init__(self, address: str, first: BeginStage) -> None:
        self.frames: list[tuple[int, bytes]] = []
        self.ending = ""
        self.stream = StageStream(address, first)
        self.stream.start(lambda *frame: self.frames.append(frame), self._end)

    def _end(self, how: str) -> None:
        self.ending = how

    async def ended(self) -> str:
        assert await asyncio.to_thread(self.stream.join, HANG_S)
        await asyncio.to_thread(self.stream.close)
        return self.ending

    async def begun(self) -> None:
        assert await asyncio.to_thread(self.stream.begun.wait, HANG_S)
        assert not self.ending


def servicer_of(folder: Path) -> StageHostServicer:
    room = StageRoom(
        folder=folder, host="127.0.0.1", device=torch.device("cpu"), threads=1, services={}
    )
    return StageHostServicer(room, turn_s=0.1)


@asynccontextmanager
async def host(folder: Path, servicer: StageHostServicer | None = None) -> AsyncIterator[str]:
    """A host in this process; its stages are processes of their own."""
    server, servicer = create_server(), servicer or servicer_of(folder)
    servicer.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        async with asyncio.timeout(HANG_S):
            await servicer.idle()
        await server.stop(None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"model_hash": "other"}, "the model is another one: .* here is .*, the instance's other"),
        ({"beside": ("transport",)}, "this host knows no service 'transport'"),
        ({"place": encode(Stage(1, 2))}, "place is a Stage; it must be a StagePlace"),
        ({"place": b"nonsense"}, "not a message between stages"),
        (
            {"place": encode(replace(PLACE, devices=("10.0.0.2:7/cuda/0",)))},
            "the stage wants 10.0.0.2:7/cuda/0, and this host has cpu",
        ),
    ],
)
async def test_a_stage_that_does_not_fit_is_refused(
    folder: Path, more: dict[str, object], message: str
) -> None:
    async with host(folder) as address:
        ending = await Stream(address, begin(folder, **more)).ended()
        assert re.match(f"failed_precondition: {message}", ending), ending


async def test_an_instance_of_another_version_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host(folder) as address:
        monkeypatch.setattr(stage_stream, "version", lambda: "0.0.9")
        ending = await Stream(address, begin(folder)).ended()
    said = f"this host has Millrace {version()}, the instance 0.0.9"
    assert ending == f"failed_precondition: {said}"


async def test_one_stage_runs_at_a_time_and_ends_with_its_stream(folder: Path) -> None:
    servicer = servicer_of(folder)
    async with host(folder, servicer) as address:
        first = Stream(address, begin(folder))
        await first.begun()
        refused = await Stream(address, begin(folder, instance="decode-0")).ended()
        assert refused == "resource_exhausted: a stage of prefill-0 runs here"
        await asyncio.to_thread(first.stream.close)
        async with asyncio.timeout(HANG_S):
            await servicer.idle()
        again = Stream(address, begin(folder))
        await again.begun()
        again.stream.send(0, encode(Stage(1, 2)))  # no command: the stage fails
        assert await again.ended() == "exit status 1"


@needs_openssl
async def test_a_host_of_a_deployment_with_tls_takes_its_peers(
    folder: Path, tmp_path: Path
) -> None:
    use_tls(Authority(tmp_path / "ca").issue(tmp_path / "own"))
    try:
        async with host(folder) as address:
            stream = Stream(address, begin(folder))
            await stream.begun()
            await asyncio.to_thread(stream.stream.close)
    finally:
        use_tls(TlsConfig())
