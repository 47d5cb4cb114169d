"""The choice of backends, with simulated availability of the GPU backends."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from millrace_kernels import (
    api,
    cpu_backend,
    dispatch,
    flashinfer_backend,
    torch_backend,
    triton_backend,
)
from millrace_kernels.cpu_backend import rows as cpu_rows
from millrace_kernels.plan import Backend
from support.attention_calls import Call

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

SHAPE = 53
"""A page size of this file alone."""

needs_cpp = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ kernels aren't built")


@pytest.fixture
def machine(monkeypatch):
    """machine("triton", ...) has these GPU backends; their plans are their names."""
    pytest.importorskip("triton", reason="triton (extra `gpu`) isn't installed")
    from millrace_kernels.triton_backend import attention

    monkeypatch.setattr(flashinfer_backend, "plan", lambda plan: "flashinfer's")
    monkeypatch.setattr(flashinfer_backend, "fills", lambda plan: True)
    monkeypatch.setattr(dispatch.trial, "failure", lambda plan, make: "")
    monkeypatch.setattr(attention, "plan", lambda plan: "triton's")

    def has(*names):
        for backend, name in ((triton_backend, "triton"), (flashinfer_backend, "flashinfer")):
            reason = "" if name in names else f"{name} isn't here"
            monkeypatch.setattr(
                backend,
                "unavailable",
                lambda device, r=reason: r if device.type == "cuda" else "not a CUDA device",
            )

    return has


def unplanned(backend="auto", *, device=CUDA, **changes):
    """A checked plan without a backend. Trials are remembered by shape: no other test has its."""
    call = Call(q_lens=(5,), kv_lens=(9,), head_dim=64, page_tokens=SHAPE, dtype=BF16)
    plan = call.plan("reference")
    return replace(plan, backend=Backend(backend), device=device, **changes)


BOTH = ("flashinfer", "triton")


@pytest.mark.parametrize(("has", "instead"), [(BOTH, "triton"), (("flashinfer",), "torch")])
def test_where_flashinfer_fails_its_trial_the_next_one_runs(
    machine, monkeypatch, caplog, has, instead
):
    """Simulates a missing compiler: the package imports, and its first plan raises."""
    trials = []

    def failing(plan, make):
        trials.append((plan, make))
        return f"RuntimeError: Ninja is not installed {instead}"  # warned of once

    monkeypatch.setattr(dispatch.trial, "failure", failing)
    machine(*has)
    shape = {"page_tokens": SHAPE + 1 + len(has)}
    for _ in range(2):
        assert dispatch.with_backend(unplanned(**shape)).backend == instead
    assert len(trials) == 1 and trials[0][1]("a plan") == "flashinfer's"
    said = f"attention on cuda runs by {instead}: FlashInfer failed its trial (RuntimeError: Ninja"
    assert caplog.text.count(said) == 1
    dispatch.with_backend(unplanned(soft_cap=30.0, **shape))  # is another module of FlashInfer's
    assert len(trials) == 2


@pytest.mark.parametrize(("has", "instead"), [(BOTH, "triton"), (("flashinfer",), "torch")])
def test_auto_leaves_calls_that_do_not_fill_the_device_to_the_next_one(
    machine, monkeypatch, has, instead
):
    machine(*has)
    monkeypatch.setattr(flashinfer_backend, "fills", lambda plan: plan.num_tokens > 5)
    assert dispatch.with_backend(unplanned()).backend == instead
    assert dispatch.with_backend(unplanned("flashinfer")).backend == "flashinfer"


class Breaking:
    """A plan of FlashInfer's that fails when it runs."""

    def __init__(self, why="no kernel image"):
        self.why = why

    def run(self, q_nhd, kv_layer, *, scale, out_nhd, lse_nh):
        out_nhd.fill_(float("nan"))
        raise RuntimeError(self.why)


@pytest.mark.parametrize("has", [BOTH, ("flashinfer",)], ids=["triton", "torch"])
@pytest.mark.parametrize("where", ["plan", "run"])
def test_where_flashinfer_fails_a_call_the_next_one_computes_it(
    machine, monkeypatch, caplog, has, where
):
    from millrace_kernels.triton_backend import attention

    shape = SHAPE + 20 + 2 * len(where) + len(has)  # no other test has it
    call = Call(q_lens=(1, 3), kv_lens=(40, 3), head_dim=64, page_tokens=shape, dtype=BF16)
    expected, _ = call.run("reference")
    made, why = [], f"no kernel image, {where} {has}"  # warned of once

    def failing(plan):
        made.append(plan)
        if where == "plan":
            raise RuntimeError(why)
        return Breaking(why)

    def torchs(plan):
        return SimpleNamespace(
            run=lambda *q_kv, **more: torch_backend.attention(
                replace(plan, native=None), *q_kv, **more
            )
        )

    machine(*has)
    monkeypatch.setattr(flashinfer_backend, "plan", failing)
    monkeypatch.setattr(attention, "plan", torchs)
    monkeypatch.setattr(flashinfer_backend, "unavailable", lambda device: "")
    if "triton" in has:
        monkeypatch.setattr(triton_backend, "unavailable", lambda device: "")
    monkeypatch.setattr(cpu_backend, "takes_dtype", lambda device, dtype: False)
    before = dispatch.fallbacks()
    for number in (1, 2):
        found, _ = call.run("auto")
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
        assert dispatch.fallbacks() == before + number
    assert len(made) == 1  # the shape is not tried again
    assert f"FlashInfer failed a call (RuntimeError: {why})" in caplog.text


def test_a_backend_asked_for_by_name_does_not_fall_back(machine, monkeypatch):
    machine(*BOTH)
    monkeypatch.setattr(flashinfer_backend, "plan", lambda plan: Breaking())
    plan = dispatch.with_backend(unplanned("flashinfer"))
    q_nhd = torch.zeros(5, 4, 64)
    with pytest.raises(RuntimeError, match="no kernel image"):
        dispatch.run_native(plan, q_nhd, q_nhd, scale=1.0, out_nhd=q_nhd, lse_nh=q_nhd)


@pytest.mark.parametrize(
    ("has", "changes", "chosen"),
    [
        (BOTH, {}, "flashinfer"),
        (BOTH, {"dtype": FP16, "head_dim": 256}, "flashinfer"),
        (BOTH, {"dtype": FP32}, "triton"),
        (BOTH, {"head_dim": 80}, "triton"),
        (BOTH, {"q_positions": torch.arange(5).int(), "sliding_window": 3}, "triton"),
        (BOTH, {"head_dim": 512}, "torch"),
        (BOTH, {"dtype": FP64}, "torch"),
        (("triton",), {}, "triton"),
        (("flashinfer",), {}, "flashinfer"),
        (("flashinfer",), {"dtype": FP32}, "torch"),
        ((), {}, "torch"),
        (BOTH, {"device": CPU, "dtype": FP64}, "torch"),
        pytest.param(BOTH, {"device": CPU}, "cpu", marks=needs_cpp),
    ],
)
def test_auto_is_the_first_that_can(machine, has, changes, chosen):
    machine(*has)
    plan = dispatch.with_backend(unplanned(**changes))
    assert plan.backend.value == chosen
    if chosen == "torch":
        assert plan.native is None
    elif chosen != "cpu":
        assert plan.native == f"{chosen}'s"


@pytest.mark.parametrize(
    ("has", "backend", "changes", "reason"),
    [
        ((), "triton", {}, "triton isn't here"),
        (("triton",), "flashinfer", {}, "flashinfer isn't here"),
        (BOTH, "triton", {"device": CPU}, "not a CUDA device"),
        (BOTH, "triton", {"head_dim": 512}, "head_dim must be at most 256, got 512"),
        (BOTH, "triton", {"dtype": FP64}, "dtype must be bfloat16, float16 or float32"),
        (BOTH, "flashinfer", {"dtype": FP32}, "takes bfloat16 and float16, not torch.float32"),
        (BOTH, "flashinfer", {"head_dim": 80}, "head_dim 64, 128, 256, not 80"),
        (BOTH, "cpu", {}, "it can't do torch.bfloat16 on cuda"),
        (BOTH, "cpu", {"device": CPU, "dtype": FP16}, "it can't do torch.float16 on cpu"),
    ],
)
def test_asked_for_by_name_it_says_why_not(machine, has, backend, changes, reason):
    machine(*has)
    with pytest.raises(ValueError, match=f"^attention backend '{backend}': .*{reason}"):
        dispatch.with_backend(unplanned(backend, **changes))


@pytest.mark.parametrize("backend", ["torch", "reference", *BOTH])
def test_asked_for_by_name_it_takes_all(machine, backend):
    machine(*BOTH)
    plan = dispatch.with_backend(unplanned(backend))
    native = f"{backend}'s" if backend in BOTH else None
    assert (plan.backend.value, plan.native) == (backend, native)


@pytest.mark.parametrize(
    ("has", "device", "dtype", "chosen"),
    [
        pytest.param(BOTH, CPU, FP32, "cpu", marks=needs_cpp),
        pytest.param((), CPU, BF16, "cpu", marks=needs_cpp),
        (BOTH, CPU, FP16, "torch"),
        (BOTH, CUDA, FP32, "triton"),
        (("triton",), CUDA, FP16, "triton"),
        (BOTH, CUDA, FP64, "torch"),
        (("flashinfer",), CUDA, BF16, "torch"),
    ],
)
def test_rows(machine, has, device, dtype, chosen):
    machine(*has)
    assert dispatch.rows_backend(device, dtype).value == chosen
    x = SimpleNamespace(device=device, dtype=dtype, is_cpu=device is CPU)
    found = dispatch.rows(x)
    if chosen == "triton":
        assert found.__name__ == "millrace_kernels.triton_backend.rows"
    else:
        assert found is {"cpu": cpu_rows, "torch": torch_backend}[chosen]


def test_linears_and_experts_are_tritons_on_its_device(machine, monkeypatch):
    machine(*BOTH)
    from millrace_kernels.triton_backend import linear, moe

    monkeypatch.setattr(dispatch, "rows_backend", lambda device, dtype: Backend.TRITON)
    monkeypatch.setattr(linear.TritonLinear, "__call__", lambda self, x, out: (self.weight, x))
    monkeypatch.setattr(moe.TritonExperts, "__call__", lambda self, *of: (self.down, *of))
    weight, x = torch.ones(4, 3), torch.ones(100, 3)
    found = api.prepare_linear(weight)(x)
    assert found[0] is weight and found[1] is x
    down = torch.ones(2, 3, 4)
    ids, weights = torch.zeros(100, 1, dtype=torch.int64), torch.ones(100, 1)
    found = api.prepare_experts(torch.ones(2, 8, 3), down)(x, ids, weights)
    assert found[0] is down and found[1:] == (x, ids, weights)
    assert api.prepare_linear(weight)(torch.ones(0, 3)).shape == (0, 4)


@pytest.mark.parametrize("out_dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("other_dtype", [FP32, BF16, FP16])
def test_a_merge_of_any_two_dtypes(out_dtype, other_dtype):
    out, other = torch.zeros(1, 2, 3, dtype=out_dtype), torch.ones(1, 2, 3, dtype=other_dtype)
    lse, other_lse = torch.zeros(1, 2), torch.zeros(1, 2)
    api.merge_attention_(out, lse, other, other_lse)
    torch.testing.assert_close(out, torch.full_like(out, 0.5))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2.0)))


@pytest.mark.parametrize("has", [BOTH, ("triton",), ()])
def test_one_line_says_what_is_here_and_why_not_the_rest(machine, monkeypatch, has):
    machine(*has)
    versions = {"triton": "3.1", "flashinfer-python": "0.2"}
    monkeypatch.setattr(flashinfer_backend.importlib.metadata, "version", versions.__getitem__)
    found = api.describe_backends()
    assert "\n" not in found and cpu_backend.describe() in found
    assert ("Triton 3.1" if "triton" in has else "no Triton (triton isn't here)") in found
    expected = "FlashInfer 0.2" if "flashinfer" in has else "no FlashInfer (flashinfer isn't here)"
    assert expected in found


def test_why_triton_is_unavailable(monkeypatch):
    unavailable = triton_backend.unavailable.__wrapped__  # clears the results
    finder = triton_backend.importlib.util
    assert unavailable(CPU) == "Triton needs a CUDA device, not cpu"
    monkeypatch.setattr(finder, "find_spec", lambda name: None)
    assert "not installed" in unavailable(CUDA)
    monkeypatch.setattr(finder, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in unavailable(CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0, cuda has (7, 5)" in unavailable(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert unavailable(CUDA) == ""
