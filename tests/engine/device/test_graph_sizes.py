"""Which CUDA graphs an engine captures, and why none."""

from __future__ import annotations

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine.device.graph_sizes import GraphSizes, describe, graph_sizes
from millrace_kernels import triton_backend

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "unavailable", lambda device: "")


def found(device: torch.device = CUDA, **settings: object) -> GraphSizes:
    made = graph_sizes(EngineConfig(**settings), 64, device, torch.bfloat16, 500)
    assert made.context_tokens == 500
    return made


def sizes(device: torch.device = CUDA, **settings: object) -> tuple[int, ...]:
    return found(device, **settings).batches


def rows(device: torch.device = CUDA, **settings: object) -> tuple[int, ...]:
    return found(device, **settings).rows


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


def test_rows_are_powers_of_two_up_to_a_pass():
    assert rows() == (16, 32, 64, 128, 256, 512)
    assert rows(max_chunk_tokens=100) == (16, 32, 64, 100)
    assert rows(max_chunk_tokens=8) == (8,)
    assert rows(cuda_graph_rows="48, 24,24") == (24, 48)
    assert rows(cuda_graph_rows="none") == rows(cuda_graphs="off") == rows(tensor_parallel=2) == ()


def test_rows_need_no_attention_of_ours():
    assert rows(attention_backend="flashinfer") == rows()
    said = describe(EngineConfig(attention_backend="flashinfer"), 64, CUDA, torch.bfloat16)
    assert "decode without CUDA graphs (graphs need Triton" in said
    assert said.endswith(", short prefills by CUDA graphs")
    said = describe(EngineConfig(cuda_graph_rows="none"), 64, CUDA, torch.bfloat16)
    assert said.endswith("short prefills without CUDA graphs (engine.cuda_graph_rows is none)")


def test_the_host_has_no_graphs():
    assert sizes(CPU) == rows(CPU) == ()
    with pytest.raises(ConfigError, match="'on', but the engine runs on cpu"):
        sizes(CPU, cuda_graphs="on")


def test_wrong_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"engine.cuda_graph_batches has 65; .*max_batch is 64"):
        sizes(cuda_graph_batches="65")
    with pytest.raises(ConfigError, match=r"engine.cuda_graph_rows has 65; .*tokens is 64"):
        sizes(cuda_graph_rows="16,65", max_chunk_tokens=64)
    for wrong in ("0", "1,", "a", "-2"):
        with pytest.raises(ConfigError, match=r"engine.cuda_graph_batches is"):
            EngineConfig(cuda_graph_batches=wrong)
        with pytest.raises(ConfigError, match=r"engine.cuda_graph_rows is .*none, or numbers"):
            EngineConfig(cuda_graph_rows=wrong)
