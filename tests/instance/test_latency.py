"""The source of a worker's latency models, and its log line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.engine import calibration
from millrace.engine.assembly import Engine, open_engine, profile_key
from millrace.instance import latency
from millrace.instance.latency import decode_step, prefill_latency
from millrace.profiles import encode, load_profile
from millrace.profiles.cache import ProfileCache
from support.tiny_models import model_folder

NAME = "llama3-8b-a100-tp1"
MEASURED = load_profile(NAME)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return EngineConfig(
        device="cpu", dtype="float32", threads=1, kv_bytes=4 << 20, profile_cache=str(tmp_path)
    )


@pytest.fixture
def engine(config: EngineConfig) -> Engine:
    return open_engine(model_folder("llama"), config)


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO):
        yield caplog


def test_the_cached_profile_of_the_key_is_used(
    engine: Engine, config: EngineConfig, told: pytest.LogCaptureFixture
) -> None:
    key = profile_key(engine.folder, config)
    path = ProfileCache(config.profile_cache).store(key, MEASURED)
    found = prefill_latency(engine, config)
    assert found == MEASURED.prefill.limited(16)  # the measured degrees
    assert "2, 4, 8, 16 measured" in told.text
    assert f"measured profile {path}" in told.text
    step_s = decode_step(engine, config).seconds(8, 8192)
    assert step_s == pytest.approx(MEASURED.operators.decode_step_s(8, 8192), rel=0.2)


def test_graphs_of_short_prefills_are_captured_before_their_times_are_measured(
    engine: Engine, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Mock()
    monkeypatch.setattr(engine.runner, "capture_prefills", calls.capture)
    monkeypatch.setattr(latency, "calibrate", calls.calibrate)
    prefill_latency(engine, config)
    assert [name for name, _, _ in calls.mock_calls if "." not in name] == ["capture", "calibrate"]


def test_a_slow_engine_is_timed_with_more_than_one_batch(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "BUDGET_S", 0.0)
    steps = calibration.calibrate_decode(engine, 8)
    assert [(size, context > 64 * size) for size, context, _ in steps] == [
        *((1, False), (1, True), (8, False))
    ]


def test_no_request_pays_the_costs_of_the_first_pass(
    engine: Engine, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ProfileCache(config.profile_cache).store(profile_key(engine.folder, config), MEASURED)
    prefill, decode = Mock(wraps=engine.runner.prefill_batch), Mock(wraps=engine.runner.decode)
    monkeypatch.setattr(engine.runner, "prefill_batch", prefill)
    monkeypatch.setattr(engine.runner, "decode", decode)
    prefill_latency(engine, config)
    assert (prefill.call_count > 0, decode.call_count) == (True, 0)
    decode_step(engine, config)
    assert decode.call_count > 0
    engine.pool.check_integrity(expected_used=0)


def test_decode_steps_are_fitted_briefly(engine: Engine, config: EngineConfig) -> None:
    step = decode_step(engine, replace(config, profile="none"))
    assert 0.0 < step.seconds(1, 64) <= step.seconds(64, 64 * 4096)
    assert min(step.base_s, step.per_sequence_s, step.per_context_token_s) >= 0.0
    engine.pool.check_integrity(expected_used=0)


@pytest.mark.parametrize(
    "change", [{"profile": "none"}, {"max_chunk_tokens": 99}, {"threads": 3}, {"stages": 2}]
)
def test_without_one_the_times_are_fitted_briefly(
    engine: Engine, config: EngineConfig, change: dict, told: pytest.LogCaptureFixture
) -> None:
    key = profile_key(engine.folder, config)
    ProfileCache(config.profile_cache).store(key, MEASURED)
    found = prefill_latency(engine, replace(config, **change))
    assert found.degrees == (1,)
    assert found.by_sp[1].points == ()
    assert 0.0 < found.chunk_s(100) < 10.0
    assert "a brief fit" in told.text
    engine.pool.check_integrity(expected_used=0)


def test_a_named_file_is_used_and_a_bad_one_named(
    engine: Engine, config: EngineConfig, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    path = ProfileCache(str(tmp_path / "other")).store(profile_key(engine.folder, config), MEASURED)
    named = replace(config, profile=str(path))
    assert prefill_latency(engine, named) == MEASURED.prefill.limited(16)
    assert str(path) in told.text
    with pytest.raises(ConfigError, match=r"none\.json: No such file"):
        prefill_latency(engine, replace(config, profile="none.json"))
    with pytest.raises(ConfigError, match=r"engine\.profile is 'fast'; it must be auto, none or"):
        replace(config, profile="fast")


def test_on_devices_of_their_own_groups_that_nobody_measured_are_estimated(
    engine: Engine,
    config: EngineConfig,
    tmp_path: Path,
    told: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency, "warm_up_prefill", lambda engine: None)  # there is no such device
    path = tmp_path / "profile.json"
    path.write_text(encode(replace(MEASURED, measured_sp=(2,)).to_json()))
    there = replace(engine, device=torch.device("cuda"))
    found = prefill_latency(there, replace(config, profile=str(path)))
    assert found.degrees == (1, 2, 4, 8, 16, 32, 64, 128)
    assert found.by_sp[2] == MEASURED.prefill.by_sp[2]
    assert "2 measured; 4, 8, 16, 32, 64, 128 estimated from one instance" in told.text
    alone_s, ring_s = found.chunk_s(10**6), engine.layout.num_layers * MEASURED.ring_step_s
    # Compute is divided; every step of the ring is paid in each layer.
    a = found.by_sp[1].a
    assert found.chunk_s(10**6, sp=4) == pytest.approx(a + (alone_s - a) / 4 + 3 * ring_s, rel=1e-3)


def test_on_cpus_a_group_that_nobody_measured_is_unknown(
    engine: Engine, config: EngineConfig, tmp_path: Path, told: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    path.write_text(encode(replace(MEASURED, measured_sp=()).to_json()))
    assert prefill_latency(engine, replace(config, profile=str(path))).degrees == (1,)
    assert "unknown; `millrace profile --sp` measures them" in told.text
