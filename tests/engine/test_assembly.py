"""Sizing of the KV pool, the choice of device, and the key of a profile."""

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine import assembly, sizing
from millrace.engine.assembly import (
    open_engine,
    open_kv_only,
    profile_key,
    resolve_device,
)
from millrace.engine.sizing import available_bytes, compute_threads, pool_bytes
from millrace_kernels import cpu_backend
from millrace_kernels.determinism import Alike
from support.tiny_models import model_folder

CPU = torch.device("cpu")


def test_a_configured_pool_is_taken_as_it_is() -> None:
    assert pool_bytes(EngineConfig(kv_bytes=12345), CPU, 1 << 40) == 12345


def test_a_pool_holds_one_context_at_least_and_a_share_of_memory_otherwise() -> None:
    assert pool_bytes(EngineConfig(), CPU, 1 << 50) == 1 << 50
    assert pool_bytes(EngineConfig(), CPU, 0) <= available_bytes()


def test_a_pool_is_a_share_of_what_the_container_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "spare_bytes", lambda: 1000)
    assert available_bytes() == 1000
    assert pool_bytes(EngineConfig(), CPU, 0) == 100


def test_a_pool_without_weights_is_laid_out_and_named_as_those_beside_them() -> None:
    config = EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=4 << 20)
    with_weights = open_engine(model_folder("llama"), config)
    alone = open_kv_only(model_folder("llama"), config)
    assert alone.layout == with_weights.layout
    assert alone.max_context_tokens == with_weights.max_context_tokens
    revised = open_kv_only(model_folder("llama"), config, "r2").layout
    assert revised.model_hash == f"{alone.layout.model_hash}@r2"


def test_the_context_is_the_models_whatever_one_pool_holds() -> None:
    config = EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=1 << 16)
    engine = open_engine(model_folder("llama"), config)
    assert engine.pool_context_tokens == engine.layout.num_pages * engine.layout.page_tokens
    assert engine.max_context_tokens > engine.pool_context_tokens


def test_a_gpu_is_refused_where_results_may_not_depend_on_the_batch(monkeypatch) -> None:
    monkeypatch.setattr(assembly, "resolve_device", lambda name: torch.device("cuda", 1))
    for open_one in (open_engine, open_kv_only):
        with pytest.raises(ConfigError, match=r"engine\.deterministic is on with cuda:1"):
            open_one(model_folder("llama"), EngineConfig(deterministic="on"))


@pytest.mark.parametrize(
    ("device", "dtype", "setting", "has_vectors", "alike"),
    [
        ("cpu", "bfloat16", "auto", True, Alike.PASSES),
        ("cpu", "bfloat16", "auto", False, Alike.NOWHERE),
        ("cpu", "float32", "auto", True, Alike.NOWHERE),
        ("cpu", "auto", "auto", True, Alike.NOWHERE),  # the model is in float32
        ("cpu", "float32", "on", False, Alike.GROUPS),
        ("cpu", "bfloat16", "off", True, Alike.NOWHERE),
        ("cuda", "bfloat16", "auto", True, Alike.NOWHERE),
        ("cuda", "bfloat16", "off", True, Alike.NOWHERE),
    ],
)
def test_rows_are_alike_where_the_setting_says_so(
    monkeypatch, device, dtype, setting, has_vectors, alike
) -> None:
    monkeypatch.setattr(cpu_backend, "uses_vectors", lambda: has_vectors)
    config = EngineConfig(deterministic=setting, dtype=dtype)
    assert assembly.alike_of(model_folder("llama"), config, torch.device(device)) is alike


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


def test_a_profile_is_kept_by_all_that_its_times_depend_on() -> None:
    folder, config = model_folder("llama"), EngineConfig(device="cpu", threads=1)
    key = profile_key(folder, config)
    assert key.model_hash == open_engine(folder, config).layout.model_hash
    assert key == profile_key(folder, EngineConfig(device="cpu", threads=1, page_tokens=32))
    for other in (
        EngineConfig(device="cpu", threads=2),
        EngineConfig(device="cpu", threads=1, dtype="bfloat16"),
        EngineConfig(device="cpu", threads=1, max_chunk_tokens=64),
        EngineConfig(device="cpu", threads=1, load_format="dummy"),
        EngineConfig(device="cpu", threads=1, deterministic="on"),
    ):
        assert profile_key(folder, other) != key
    assert profile_key(model_folder("qwen3"), config) != key


@pytest.mark.parametrize(
    ("configured", "variable", "threads"),
    [(3, "2", 3), (0, "2", 2), (0, "4,1", 4), (0, "0", None), (0, "many", None), (0, "", None)],
)
def test_threads_are_those_of_the_setting_the_variable_or_the_cores(
    monkeypatch: pytest.MonkeyPatch, configured: int, variable: str, threads: int | None
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr(sizing, "usable_cores", lambda: 7)
    assert compute_threads(EngineConfig(threads=configured)) == (threads or 7)
