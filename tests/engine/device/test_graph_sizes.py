"""Which CUDA graphs an engine captures, and why none."""

from __future__ import annotations

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.device.graph_sizes import describe, graph_sizes
from millrace_kernels import triton_backend

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "unavailable", lambda device: "")


def sizes(device: torch.device = CUDA, **settings: object) -> tuple[int, ...]:
    found = graph_sizes(EngineConfig(**settings), 64, device, torch.bfloat16, 500)
    assert found is None or found.context_tokens == 500
    return () if found is None else found.batches


def test_sizes_are_powers_of_two_and_the_largest_batch():
    assert sizes(max_batch=64) == (1, 2, 4, 8, 16, 32, 64)
    assert sizes(max_batch=48) == (1, 2, 4, 8, 16, 32, 48)
    assert sizes(max_batch=1) == (1,)
    assert sizes(cuda_graph_batches="24, 8,8") == (8, 24)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cuda_graphs": "off"}, "engine.cuda_graphs is off"),
        ({"tensor_parallel": 2}, "engine.tensor_parallel is 2; graphs need one rank"),
        ({"attention_backend": "flashinfer"}, "engine.attention_backend is 'flashinfer'"),
    ],
)
def test_an_engine_says_why_it_has_no_graphs(settings, why):
    assert sizes(**settings) == ()
    assert why in describe(EngineConfig(**settings), 64, CUDA, torch.bfloat16)
    if "cuda_graphs" not in settings:
        with pytest.raises(ConfigError, match=r"engine.cuda_graphs is 'on', but .*" + why[-20:]):
            sizes(**settings, cuda_graphs="on")


def test_the_host_has_no_graphs():
    assert sizes(CPU) == ()
    with pytest.raises(ConfigError, match="'on', but the engine runs on cpu"):
        sizes(CPU, cuda_graphs="on")


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"engine.cuda_graph_batches has 65; .*max_batch is 64"):
        sizes(cuda_graph_batches="65")
    for wrong in ("0", "1,", "a", "-2"):
        with pytest.raises(ConfigError, match=r"engine.cuda_graph_batches is"):
            EngineConfig(cuda_graph_batches=wrong)
