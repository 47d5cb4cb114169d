"""`millrace doctor`: what it says of clocks, stores, instances and paths, and of a live stack."""

from __future__ import annotations

import os
import signal

import pytest

from millrace.cli.doctor import fleet as fleet_module
from millrace.cli.doctor.findings import FAILURE, OK, WARNING, Finding
from millrace.cli.doctor.fleet import fleet, missing_roles, of_instance, of_paths
from millrace.cli.doctor.machine import machine
from millrace.cli.doctor.store import eviction, latency, skew, store
from millrace.core.config import StoreConfig
from millrace.core.kv.probe import Examination, PeerProbe
from millrace.version import version
from support.live_stack import live_stack
from support.served_model import served_folder


@pytest.mark.parametrize(
    ("finding", "level", "said"),
    [
        (skew("x", 0.2), OK, "0.200 s ahead"),
        (skew("x", -3.0), WARNING, "3.000 s behind"),
        (latency("x", [0.001, 0.002, 0.05]), OK, "2.00 ms, 50.00 ms at most"),
        (latency("x", [0.02, 0.03]), WARNING, "25.00 ms"),
        (eviction("x", "allkeys-lru", 0), OK, "evicts nothing"),
        (eviction("x", "noeviction", 5), OK, "evicts nothing"),
        (eviction("x", "allkeys-lru", 5), FAILURE, "allkeys-lru"),
    ],
)
def test_a_finding_says_how_it_is_and_what_to_do(finding: Finding, level: str, said: str) -> None:
    assert finding.level == level and said in finding.text
    assert bool(finding.advice) == (level != OK)


def test_roles_without_which_nothing_is_served() -> None:
    assert [one.text for one in missing_roles({"prefill": 1})] == ["no decode instance"]
    assert not list(missing_roles({"mixed": 1}))


def test_another_version_and_another_clock_are_told() -> None:
    found = Examination(version="0.0.1", unix_s=1010.0, device="cpu", peers=())
    assert [one.level for one in of_instance("x", found, 1000.0)] == [WARNING, WARNING]
    same = Examination(version=version(), unix_s=1000.1, device="cpu", peers=())
    assert [one.level for one in of_instance("x", same, 1000.0)] == [OK, OK]


def test_a_path_that_fails_is_told_with_its_error() -> None:
    peers = (
        PeerProbe(instance_id="b", error="", seconds=0.1),
        PeerProbe(instance_id="c", error="unreachable", seconds=9.0),
    )
    found = Examination(version="", unix_s=0.0, device="cpu", peers=peers)
    good, bad = of_paths("a", found)
    assert (good.level, good.subject) == (OK, "KV between a and b")
    assert (bad.level, bad.text) == (FAILURE, "unreachable") and bad.advice


async def test_a_store_that_is_away_is_a_failure(tmp_path) -> None:
    config = StoreConfig(url=f"unix://{tmp_path}/none.sock")
    (finding,) = [one async for one in store(config)]
    assert finding.level == FAILURE and "does not answer" in finding.text


async def test_a_scheduler_that_is_away_is_a_failure() -> None:
    (finding,) = [one async for one in fleet("127.0.0.1:1")]
    assert finding.level == FAILURE and "--scheduler" in finding.advice


def test_this_machine_is_described() -> None:
    assert any(version() in one.text for one in machine())


async def test_a_live_stack_is_well_until_an_instance_hangs(monkeypatch) -> None:
    settings = ["engine.dtype=float32", "scheduler.lease_s=60"]
    async with live_stack(served_folder("qwen3"), prefill=2, settings=settings) as stack:
        arguments = stack.services["proxy"].arguments
        url = next(a for a in arguments if a.startswith("store.url=")).removeprefix("store.url=")
        assert {one.level async for one in store(StoreConfig(url=url))} == {OK}
        well = [one async for one in fleet(stack.scheduler_address)]
        assert {one.level for one in well} == {OK}, well
        assert sum(one.subject.startswith("KV between") for one in well) == 3  # all pairs of three

        monkeypatch.setattr(fleet_module, "ANSWER_TIMEOUT_S", 2.0)
        process = stack.services["prefill-1"].process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        try:
            ill = [one async for one in fleet(stack.scheduler_address)]
        finally:
            os.kill(process.pid, signal.SIGCONT)
        failures = [one for one in ill if one.level == FAILURE]
        assert [one.subject for one in failures] == ["prefill prefill-1"]
        assert sum(one.subject.startswith("KV between") for one in ill) == 1
