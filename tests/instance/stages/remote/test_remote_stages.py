"""A later stage on another host: the process of `millrace stage`, reached by its address."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch

from millrace.bench.common.random_model import write_random_llama
from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.errors import EngineDied
from millrace.instance.stages.stages import open_staged_engine
from millrace.instance.transfer.transports import serve_member
from support.kvp_world import check_holds_a_shard
from support.stage_host import StageHost
from support.staged import FIVE_LAYERS
from support.tiny_engine import Request, decode, prefill
from support.tiny_models import prompt


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stages")
    write_random_llama(folder, FIVE_LAYERS)
    return folder


@pytest.fixture(scope="module")
def host(folder: Path) -> Iterator[StageHost]:
    torch.set_num_threads(1)
    made = StageHost(folder)
    yield made
    assert made.end() == 0


def settings(**more: object) -> EngineConfig:
    values = {"device": "cpu", "kv_bytes": 1 << 22, "max_chunk_tokens": 64, "threads": 1, **more}
    return EngineConfig(**values)  # type: ignore[arg-type]


@contextmanager
def staged(folder: Path, addresses: str, **more: object) -> Iterator[Engine]:
    config = settings(stages=1 + len(addresses.split(",")), stage_hosts=addresses, **more)
    engine = open_staged_engine(str(folder), config, "127.0.0.1", transport=serve_member)
    try:
        yield engine
    finally:
        engine.close()


def logits(engine: Engine) -> torch.Tensor:
    """Those of a prompt in two chunks and of three decode steps."""
    request = Request(engine.runner, prompt(150), room=4)
    found = [prefill(engine.runner, request, (60, 100)).unsqueeze(0)]
    for _ in range(3):
        request.tokens.append(7)
        found.append(decode(engine.runner, [request]))
    engine.check_integrity()
    return torch.cat(found)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_on_other_hosts_compute_the_same_one_instance_after_the_other(
    folder: Path, host: StageHost, ranks: int
) -> None:
    wanted = open_engine(folder, settings(tensor_parallel=ranks))
    expected = logits(wanted)
    wanted.close()
    for _ in range(2):
        with staged(folder, host.address, tensor_parallel=ranks) as engine:
            assert torch.equal(logits(engine), expected)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_stages_on_other_hosts_attend_for_an_owner(
    folder: Path, host: StageHost, ranks: int
) -> None:
    with staged(folder, host.address, tensor_parallel=ranks) as engine:
        assert engine.members is not None
        check_holds_a_shard(folder, engine.runner, engine.members.shards)


def test_the_death_of_a_stage_on_another_host_ends_the_instance_alone(
    folder: Path, host: StageHost
) -> None:
    with staged(folder, host.address) as engine:
        expected = logits(engine)
        request = Request(engine.runner, prompt(150))
        os.kill(host.stage().pid, signal.SIGKILL)
        where = re.escape(f"stage 1 at {host.address} died, killed by SIGKILL")
        with pytest.raises(EngineDied, match=where):
            prefill(engine.runner, request, (60, 100))
    with staged(folder, host.address) as engine:  # the host takes the next one
        assert torch.equal(logits(engine), expected)


def test_the_death_of_the_host_ends_the_instance(folder: Path) -> None:
    other = StageHost(folder)
    with staged(folder, other.address) as engine:
        request = Request(engine.runner, prompt(150))
        stage = other.stage()
        other.process.kill()
        other.process.wait()
        with pytest.raises(EngineDied, match=f"stage 1 at {other.address} died, unavailable"):
            prefill(engine.runner, request, (60, 100))
    psutil.wait_procs([stage])  # it ends with its host


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stages": 3, "stage_hosts": "a:1"}, "stage_hosts has 1 addresses and .*stages is 3"),
        ({"stages": 1, "stage_hosts": "a:1"}, "stage_hosts has 1 addresses and .*stages is 1"),
        ({"stages": 2, "stage_hosts": "a:1", "kv_pools": "shared"}, "kv_pools is 'shared'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    folder: Path, more: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_staged_engine(str(folder), settings(**more), "127.0.0.1", transport=serve_member)


@pytest.mark.parametrize("value", ["a", "a:", ":1", "a:0", "a:1;b:2", "a:1,,b:2", "a:99999999"])
def test_addresses_that_make_no_sense_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"engine\.stage_hosts is .* addresses HOST:PORT"):
        settings(stage_hosts=value)
