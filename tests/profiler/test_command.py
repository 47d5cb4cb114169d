"""`millrace profile` and the measurement at the first start."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from millrace.cli.main import app
from millrace.core.config import EngineConfig
from millrace.core.cost.profile import Profile
from millrace.engine.assembly import profile_key
from millrace.local import first_start
from millrace.profiler import command, measure
from millrace.profiles import load_profile
from millrace.profiles.cache import ProfileCache
from support.tiny_models import model_folder

QUICK = ("--budget-s", "1", "--max-tokens", "128", "--device", "cpu", "--threads", "1")
SETTINGS = ("--dtype", "float32", "--set", "engine.kv_bytes=4194304")
ENGINE = EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=4194304)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache" / "millrace" / "profiles"
    monkeypatch.delenv("MILLRACE_ENGINE__PROFILE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def profile(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["profile", *map(str, arguments)], catch_exceptions=False)
    return result.exit_code, result.stdout, result.stderr


def kept(cache: Path) -> Profile | None:
    return ProfileCache(str(cache)).load(profile_key(model_folder("llama"), ENGINE))


def test_it_measures_keeps_writes_and_is_read_by_the_simulator(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    model, out, report = model_folder("llama"), tmp_path / "p.json", tmp_path / "r.json"
    # Rounds end the measurement, not the budget: on a slow machine, the budget would allow only a
    # longest prompt that is too short for held-out points.
    monkeypatch.setattr(measure, "MOST_ROUNDS", 2)
    quick = (*QUICK, "--budget-s", "10000")
    status, said, error = profile(model, *quick, *SETTINGS, "--out", out, "--json", report)

    assert status == 0, error
    assert kept(cache) == load_profile(str(out))
    assert list(cache.iterdir()) == [ProfileCache(str(cache)).path(profile_key(model, ENGINE))]
    assert "held-out points" in said and "prefill" in said
    points = json.loads(report.read_text())["points"]
    assert {"prefill", "operators", "decode", "batched", "mixed"} <= {
        point["model"] for point in points
    }

    import typer

    from millrace.cli.sim.command import register

    simulator = typer.Typer()
    register(simulator)
    traffic = ("--mix", "medha-mix", "--rate", "1", "--requests", "5")
    ran = CliRunner().invoke(simulator, ["run", "--profile", str(out), *traffic])
    assert ran.exit_code == 0, ran.output


def test_if_missing_measures_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    model = model_folder("llama")
    asked = (model, *QUICK, *SETTINGS, "--if-missing")
    first = profile(*asked)
    monkeypatch.setattr(command, "measure", None)  # calling it would raise
    second = profile(*asked)
    assert (first[0], second[0]) == (0, 0)
    path = next(cache.iterdir())
    assert first[1].splitlines()[-1] == second[1].strip() == str(path)

    path.write_text("{")
    with pytest.raises(TypeError):
        profile(*asked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none",), "none: no such model folder"),
        (("--budget-s", "0"), "budget_s is 0; it must be more than 0"),
        (("--budget-s", "nan"), "budget_s is nan; it must be more than 0"),
        (("--max-tokens", "20000"), "max_tokens is 20000; it must be 1 to 16383"),
        (("--max-tokens", "-5"), "max_tokens is -5; it must be 1 or more"),
        (("--dtype", "int3"), "engine.dtype is 'int3'; it must be one of"),
        (("--device", "gpux"), "engine.device is 'gpux'; it must be"),
        (("--sp", "1"), "sp has 1; a group has 2 instances or more"),
        (("--threads", "-1"), "engine.threads is -1; it must be between 0"),
        (("--out", "."), ". can't be written"),
        (("--set", "engine.stages=2"), "engine.stages is 2; profiles are of whole instances"),
    ],
)
def test_bad_input_is_named_in_a_line_and_nothing_is_kept(
    arguments: tuple[str, ...], message: str, cache: Path
) -> None:
    status, said, error = profile(*arguments)
    assert status == 1
    assert said == ""
    last = error.splitlines()[-1]
    assert last.startswith("millrace: ") and message in last
    assert not cache.exists()


@pytest.mark.slow
def test_groups_are_measured_on_live_instances(cache: Path) -> None:
    model = model_folder("llama")
    asked = (model, *QUICK, *SETTINGS, "--sp", "2")
    status, said, error = profile(*asked)
    assert status == 0, error
    found = kept(cache)
    assert found is not None and found.measured_sp == (2,)
    assert "sp2" in said and found.errors["sp2"] >= 0.0
    assert found.prefill.by_sp[2].points
    assert profile(*asked, "--if-missing")[1].strip() == str(next(cache.iterdir()))


def test_ctrl_c_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    out = tmp_path / "p.json"
    assert profile(model_folder("llama"), *QUICK, *SETTINGS, "--out", out)[0] == 130
    assert not out.exists()
    assert not cache.exists()


async def test_a_first_start_measures_and_the_next_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(first_start, "BUDGET_S", 0.2)
    model = model_folder("llama")
    engine = EngineConfig(profile_cache=str(cache))
    arguments = [*SETTINGS, "--device", "cpu", "--threads", "1"]
    await first_start.profile_first(str(model), engine, arguments)
    assert kept(cache) is not None

    started = []

    async def start(*command: str, **_: object) -> None:
        started.append(command)
        raise OSError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    await first_start.profile_first(str(model), engine, arguments)
    assert not started
    with pytest.raises(OSError):
        await first_start.profile_first(str(model), engine, [*arguments, "--threads", "2"])
    with pytest.raises(OSError):  # groups were not measured
        await first_start.profile_first(str(model), engine, arguments, (2, 4))
    *_, budget_s, asked = (
        started[-1][started[-1].index(option) + 1] for option in ("--budget-s", "--sp")
    )
    assert (float(budget_s), asked) == (0.4, "2,4")
    ProfileCache(str(cache)).path(profile_key(model, ENGINE)).unlink()
    with pytest.raises(OSError):
        await first_start.profile_first(str(model), engine, arguments)
    assert len(started) == 3


async def test_a_start_that_is_stopped_while_it_measures_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(first_start, "BUDGET_S", 100.0)
    started: asyncio.Future[asyncio.subprocess.Process] = asyncio.Future()
    create = asyncio.create_subprocess_exec

    async def start(*command: str, **options: object) -> asyncio.subprocess.Process:
        started.set_result(await create(*command, **options))
        return started.result()

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start)
    measuring = asyncio.create_task(
        first_start.profile_first(str(model_folder("llama")), EngineConfig(), SETTINGS)
    )
    process = await started
    await asyncio.sleep(0.5)
    measuring.cancel()
    with pytest.raises(asyncio.CancelledError):
        await measuring
    assert process.returncode is not None
    assert kept(cache) is None
