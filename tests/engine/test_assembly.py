"""Sizing of the KV pool, the choice of device, and the start-up fit of Eq. (1)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.assembly import (
    available_bytes,
    fit_latency,
    open_engine,
    pool_bytes,
    resolve_device,
)
from support.tiny_models import model_folder

CPU = torch.device("cpu")


@given(
    a=st.floats(0, 0.1),
    b=st.floats(1e-6, 1e-2),
    d=st.floats(0, 1e-5),
)
def test_the_fit_finds_the_coefficients_it_was_drawn_from(a: float, b: float, d: float) -> None:
    points = [(n, a + b * n + d * n * n) for n in (16, 32, 64, 128, 256, 512, 1024)]

    fitted = fit_latency(points)

    for length, seconds in points:
        assert fitted.chunk_s(length, 0) == pytest.approx(seconds, rel=1e-4)
    assert fitted.c == 2 * fitted.d


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=7))
def test_no_term_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    fitted = fit_latency([(16 << i, s) for i, s in enumerate(seconds)])

    assert min(fitted.a, fitted.b, fitted.c, fitted.d) >= 0


def test_a_configured_pool_is_taken_as_it_is() -> None:
    assert pool_bytes(EngineConfig(kv_bytes=12345), CPU, 1 << 40) == 12345


def test_a_pool_holds_one_context_at_least_and_a_share_of_memory_otherwise() -> None:
    assert pool_bytes(EngineConfig(), CPU, 1 << 50) == 1 << 50
    assert pool_bytes(EngineConfig(), CPU, 0) <= available_bytes()


def test_an_unusable_device_is_named() -> None:
    with pytest.raises(ConfigError, match=r"engine.device is 'gpux'"):
        resolve_device("gpux")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no CUDA device"):
            resolve_device("cuda:0")


def test_the_engine_says_who_computes_what() -> None:
    engine = open_engine(model_folder("llama"), EngineConfig(device="cpu", dtype="float32"))
    assert engine.backends.startswith("attention cpu, linears and sampling cpu; kernels: torch")
    asked = EngineConfig(device="cpu", dtype="float32", attention_backend="reference")
    assert open_engine(model_folder("llama"), asked).backends.startswith("attention reference,")


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_an_attention_backend_that_cant_run_here_is_refused_at_start(name: str) -> None:
    config = EngineConfig(device="cpu", dtype="float32", attention_backend=name)
    with pytest.raises(ConfigError, match=rf"engine.attention_backend is '{name}': .*cpu"):
        open_engine(model_folder("llama"), config)


def test_an_unknown_attention_backend_is_no_setting() -> None:
    with pytest.raises(ConfigError, match=r"engine.attention_backend.*'cudnn'"):
        EngineConfig(attention_backend="cudnn")
