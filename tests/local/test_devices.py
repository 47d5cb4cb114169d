"""The assignment of a machine's GPUs. No test here needs a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.core.errors import ConfigError
from millrace.engine.sizing import CUDA_POOL_SHARE, cuda_pool_bytes
from millrace.local.devices import DevicePool, device_names, gpus_there
from millrace.local.options import StackOptions
from millrace.local.processes.service import Service
from millrace.local.stack import Stack
from support.live_stack import eventually

FOUR = ["0", "1", "2", "3"]


def pool(devices: list[str], *, each: int = 1, shared: bool = False, **fleet: int) -> DevicePool:
    return DevicePool(devices, fleet, each=each, shared=shared)


def test_each_instance_has_a_device_and_gives_it_back() -> None:
    devices = pool(FOUR, prefill=2, decode=1, kvp=1)
    assert [devices.take(name) for name in "abcd"] == [("0",), ("1",), ("2",), ("3",)]
    assert devices.memory_share == 1
    with pytest.raises(ConfigError, match="e needs 1 GPUs, and no more are free"):
        devices.take("e")
    devices.give_back("b")
    devices.give_back("b")
    assert devices.take("e") == ("1",)


def test_an_instance_of_several_ranks_has_several() -> None:
    devices = pool(FOUR, each=2, prefill=1, decode=1)
    assert [devices.take(name) for name in "ab"] == [("0", "1"), ("2", "3")]


def test_too_few_say_how_many_are_needed_and_there() -> None:
    with pytest.raises(ConfigError) as refused:
        pool(["0"], prefill=2, decode=1, kvp=0)
    assert str(refused.value) == (
        "2 prefill + 1 decode instances with 1 GPU each need 3; 1 is there (0). Start fewer "
        "instances, name more with --devices, or share them: --share-devices"
    )
    with pytest.raises(ConfigError, match=r"2 prefill instances with 4 GPUs each need 8; 4 are"):
        pool(FOUR, each=4, prefill=2)
    for shared in (False, True):
        with pytest.raises(ConfigError, match=r"an instance needs 8 GPUs; 4 are there \(0, 1"):
            pool(FOUR, each=8, shared=shared, prefill=1)


@pytest.mark.parametrize(
    ("there", "fleet", "taken", "share"),
    [
        (["0"], {"prefill": 2, "decode": 1}, [("0",)] * 3, 1 / 3),
        (["0", "1"], {"prefill": 2, "decode": 1}, [("0",), ("1",), ("0",)], 1 / 2),
        (FOUR, {"prefill": 2, "decode": 1}, [("0",), ("1",), ("2",)], 1),
        ([], {"prefill": 2, "decode": 1}, [()] * 3, 1),
    ],
)
def test_shared_devices_are_split_evenly(there, fleet, taken, share) -> None:
    devices = pool(there, shared=True, **fleet)
    assert [devices.take(str(i)) for i in range(3)] == taken
    assert devices.memory_share == pytest.approx(share)


@pytest.mark.parametrize(
    ("option", "visible", "device", "cuda", "names"),
    [
        ("", None, "auto", "13.0", ["0", "1"]),  # the system's GPUs
        ("", "3,5", "auto", "13.0", ["3", "5"]),
        ("", "", "auto", "13.0", []),
        ("1, 0", "3,5", "cuda", "13.0", ["1", "0"]),
        ("", "3,5", "cuda:1", "13.0", ["5"]),
        ("", "3,5", "cpu", "13.0", []),
        ("", "3,5", "auto", "", []),
    ],
)
def test_the_devices_are_those_asked_for_or_visible(
    monkeypatch, option, visible, device, cuda, names
) -> None:
    monkeypatch.setattr("millrace.local.devices.gpus_there", lambda: 2)
    assert device_names(option, visible, device=device, torch_cuda=cuda) == names


def test_devices_that_can_t_be_used_are_refused() -> None:
    for device, cuda, why in (("cpu", "13.0", "device is cpu"), ("auto", "", "without CUDA")):
        with pytest.raises(ConfigError, match=f"--devices '0': .*{why}"):
            device_names("0", None, device=device, torch_cuda=cuda)
    with pytest.raises(ConfigError, match="--devices names 1 twice"):
        device_names("0,1,1", None, device="auto", torch_cuda="13.0")


def test_a_machine_s_gpus_are_counted_by_their_files(tmp_path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert gpus_there(tmp_path) == 2


def test_a_share_of_a_device_s_memory_counts_what_the_instance_has_taken() -> None:
    gib = 1 << 30
    assert cuda_pool_bytes(60 * gib, 80 * gib, 20 * gib, 1.0) == int(60 * gib * CUDA_POOL_SHARE)
    assert cuda_pool_bytes(60 * gib, 80 * gib, 20 * gib, 0.5) == int(20 * gib * CUDA_POOL_SHARE)
    assert cuda_pool_bytes(5 * gib, 80 * gib, 20 * gib, 0.5) == int(5 * gib * CUDA_POOL_SHARE)
    with pytest.raises(ConfigError, match=r"engine\.device_share is 0\.25; .* nothing is left"):
        cuda_pool_bytes(60 * gib, 80 * gib, 20 * gib, 0.25)


@pytest.fixture
def started(monkeypatch) -> list[Service]:
    """Records services instead of starting them."""
    found: list[Service] = []

    async def start(service: Service, timeout_s: float) -> None:
        found.append(service)
        service.serving = True

    monkeypatch.setattr(Service, "start", start)
    return found


def options(**changes: Any) -> StackOptions:
    return StackOptions(model="none", **changes)


async def test_a_stack_gives_its_instances_their_devices(started) -> None:
    stack = Stack(options(devices=["4", "5"], prefill=1, decode=1, most={"prefill": 1}))
    leaving, kept = stack.add("prefill"), stack.add("decode")
    await eventually(lambda: len(started) == 2)
    visible = {s.name: s.environment["CUDA_VISIBLE_DEVICES"] for s in started}
    assert visible == {leaving: "4", kept: "5"}
    next_one = stack.add("prefill")  # its device is that of the leaving instance
    stack.remove(leaving)
    await eventually(lambda: len(started) == 3)
    assert (started[2].name, started[2].environment) == (next_one, {"CUDA_VISIBLE_DEVICES": "4"})
    await stack.stop()


async def test_who_shares_a_device_is_told_his_share_and_others_nothing() -> None:
    shared = options(devices=["0"], share_devices=True)
    assert "engine.device_share=0.3333" in shared.engine_settings("prefill")
    for one in (options(devices=["0", "1", "2"]), options()):
        assert not [s for s in one.engine_settings("prefill") if "device_share" in s]
    with pytest.raises(ConfigError, match="need 3; 2 are there"):
        Stack(options(devices=["0", "1"]))
    with pytest.raises(ConfigError, match=r"4 prefill \+ 1 decode instances .* need 5"):
        Stack(options(devices=["0", "1", "2"], most={"prefill": 4}))
