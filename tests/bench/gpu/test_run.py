"""`millrace bench gpu`: the roofline's arithmetic, the parts on the CPU, and kept reports."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from millrace.bench.gpu import bootstrap, roofline, shard, wheels
from millrace.bench.gpu.command import LIMITS_S, Settings
from millrace.bench.gpu.document import Finding, Report
from millrace.bench.gpu.part import Context, Found
from millrace.bench.gpu.parts import (
    decode,
    kernels,
    oracle,
    speed,
    stages,
    tensor_parallel,
    transfer,
)
from millrace.bench.gpu.report import print_tables
from millrace.bench.gpu.run import run, run_part, status_of
from millrace.bench.gpu.shapes import FAMILIES, LLAMA_3_8B, QWEN3_30B_A3B, write_config
from millrace.core.errors import ConfigError, TransferError
from millrace.engine.model.config import ModelConfig
from millrace.profiles import load_profile

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def shape(tmp_path: Path, config: object) -> ModelConfig:
    return ModelConfig.from_folder(write_config(tmp_path / "model", config))


def test_llama_8b_takes_its_parameters_twice_in_flops_and_bytes(tmp_path):
    model = shape(tmp_path, LLAMA_3_8B)
    layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14_336
    head = 4096 * 128_256
    one = roofline.prefill_flops(model, 1)
    assert one == 2 * (32 * layer + head) + 4 * 4096 * 32
    assert roofline.decode_bytes(model, 1, 0) == 2 * (32 * layer + head)
    kv = roofline.decode_bytes(model, 8, 1000) - roofline.decode_bytes(model, 8, 0)
    assert kv == 8 * 1000 * 131_072


def test_chunks_of_a_prompt_add_up_to_the_prompt(tmp_path):
    model = shape(tmp_path, LLAMA_3_8B)
    logits = 2.0 * model.hidden_size * model.vocab_size  # each chunk's own
    chunks = sum(roofline.prefill_flops(model, 500, start) - logits for start in (0, 500))
    assert chunks == roofline.prefill_flops(model, 1000) - logits


def test_a_mixture_reads_the_experts_that_a_batch_chooses(tmp_path):
    model = shape(tmp_path, QWEN3_30B_A3B)
    expert = 2 * 48 * 3 * 2048 * 768  # bytes of one expert of every layer
    least = roofline.decode_bytes(model, 1, 0)
    assert roofline.decode_bytes(model, 10_000, 0) - least == pytest.approx(120 * expert)
    two = 128 * (1 - (120 / 128) ** 2)
    assert roofline.decode_bytes(model, 2, 0) - least == pytest.approx((two - 8) * expert)


def test_expected_rates_are_shares_of_the_peaks(tmp_path):
    model = shape(tmp_path, LLAMA_3_8B)
    peaks = roofline.Peaks(flops_per_s=1e15, bytes_per_s=4e12)
    prefill_s = 8192 / roofline.expected_prefill(model, 8192, peaks)
    assert roofline.prefill_flops(model, 8192) / prefill_s == pytest.approx(0.65e15)
    step_s = 32 / roofline.expected_decode(model, 32, 2048, peaks)
    assert roofline.decode_bytes(model, 32, 2048) / step_s == pytest.approx(3.2e12)


def checked(part: ModuleType) -> Found:
    """Runs a part in this process: `test_a_part_and_its_report` has one of its own."""
    context = Context(CPU, ROOT)
    part.check(context)
    assert status_of(context.found, 0) == "passed", context.found
    return context.found


def test_a_part_and_its_report():
    document = run(Settings(device="cpu", parts=("preemption",), source=str(ROOT)))
    report = Report.model_validate(json.loads(json.dumps(document)))
    (preemption,) = report.parts
    assert preemption.status == "passed", report
    assert preemption.findings[0].detail == "17 boundaries"  # embed, 3 layers of 5, lm_head
    assert report.device_type == "cpu" and report.passed
    shown = io.StringIO()
    print_tables(document, Console(file=shown, width=200))
    assert "preemption: passed" in shown.getvalue() and "\npassed\n" in shown.getvalue()


def test_families_on_the_cpu_agree_with_the_reference():
    part = checked(oracle)
    assert {finding.name.partition(" ")[0] for finding in part.findings} == set(FAMILIES)


def test_steps_on_the_cpu_give_the_tokens_of_steps_one_by_one_and_of_transformers():
    part = checked(decode)
    assert [finding.name.partition(":")[0] for finding in part.findings] == [
        *("llama", "mistral", "qwen3_moe"),
        "the tokens of transformers",
    ]
    values = {figure.name: figure.value for figure in part.figures}
    assert len(values) == 2 * (2 * 3 + 2) + 1 and all(value > 0 for value in values.values())


@pytest.mark.parametrize("part", [tensor_parallel, stages])
def test_members_on_the_cpu_agree_with_one(part):
    assert len(checked(part).findings) == 4


def test_speed_on_the_cpu_puts_measured_beside_expected():
    part = checked(speed)
    prefill = next(figure for figure in part.figures if figure.name.startswith("prefill"))
    assert prefill.expected and prefill.share and prefill.value > 0
    # Both come from one count of FLOPs: at the expected rate the share is the asked one.
    assert prefill.share / prefill.value * prefill.expected == pytest.approx(0.65)


def test_a_transfer_within_one_process_is_measured_in_all_and_in_few_runs():
    rates = transfer.send_within(CPU, 16 << 20)
    assert list(rates) == [
        "within one process, runs of 256 KiB",
        "within one process, runs of 256 KiB, 256 KiB in all",
    ]
    assert all(rate > 0 for rate in rates.values())


def test_a_transfer_within_one_process_that_changes_bytes_is_told(monkeypatch):
    swapped = transfer.Runs.of(0, 64 << 10, 64 << 10)
    monkeypatch.setattr(transfer, "scattered", lambda count: swapped)
    with pytest.raises(TransferError, match="bytes differ within one process"):
        transfer.send_within(CPU, 16 << 20)


def test_a_part_that_hangs_or_breaks_is_reported():
    hung = run_part("oracle", CPU, ROOT, 0.01)
    assert hung.status == "failed" and hung.reason.startswith("it ran longer than 0.01 s")
    broken = run_part("no_such_part", CPU, ROOT, 60.0)
    assert broken.status == "failed" and "No module named" in broken.reason


def test_a_part_for_which_no_time_is_left_is_skipped():
    settings = Settings(device="cpu", parts=("oracle",), source=str(ROOT), limit_s=0.1)
    (part,) = Report.model_validate(run(settings)).parts
    assert part.status == "skipped" and part.reason == "no time was left: --limit-s"


def test_shards_share_all_tests(monkeypatch):
    every, found = list(range(10)), []
    for index in range(3):
        items = every.copy()
        monkeypatch.setenv(shard.VARIABLE, f"{index}/3")
        shard.pytest_collection_modifyitems(items)
        assert items == sorted(items) and len(items) >= 3
        found += items
    assert sorted(found) == every


def test_kernels_are_checked_where_the_cpp_modules_are_missing(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'millrace_kernels._cpu':\n"
        "            raise ImportError('not built')\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    context = Context(CPU, ROOT)
    tests = ["tests/kernels/triton/comparisons.py", "-k", "test_merging"]
    kernels.compare(context, {"triton": kernels.start(context, tests)})
    (finding,) = context.found.findings
    assert finding.passed and "passed" in finding.detail, finding


def test_a_part_without_findings_is_not_passed():
    good, bad = Finding(name="a", passed=True), Finding(name="b", passed=False)
    assert status_of(Found(findings=[good]), 0) == "passed"
    assert status_of(Found(findings=[good, bad]), 0) == "failed"
    assert status_of(Found(findings=[good]), None) == "failed"
    assert status_of(Found(), 0) == "failed"
    assert status_of(Found(skipped="no device"), 0) == "skipped"


def test_all_parts_together_take_less_than_ten_minutes():
    assert sum(LIMITS_S.values()) < 600


def test_a_wrong_source_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--source is .*; it must be Millrace's source tree"):
        run(Settings(device="cpu", parts=(), source=str(tmp_path)))


def test_kept_reports_follow_the_schema():
    kept = ROOT / "docs/benchmarks/gpu"
    for path in (*kept.glob("*.json"), *kept.glob("parts/*.json")):
        document = json.loads(path.read_text())
        assert Report.model_validate(document).device_type == "cuda", path
        assert path.name == bootstrap.name_of(document)
    with pytest.raises(ValidationError, match="device"):
        Report.model_validate({"date": "2026-01-01"})


def test_kept_profiles_are_of_gpus_and_tell_their_errors():
    paths = list((ROOT / "docs/benchmarks/gpu/profiles").glob("*.json"))
    assert paths
    for path in paths:
        profile = load_profile(str(path))
        assert profile.device.startswith("NVIDIA") and profile.operators.attn_call_s > 0
        assert max(profile.errors[name] for name in ("prefill", "operators", "decode")) < 0.05


def test_a_report_is_named_by_device_and_date():
    document = {"device": "NVIDIA H200 (141 GB)", "date": "2026-11-25"}
    assert bootstrap.name_of(document) == "nvidia-h200-141-gb-2026-11-25.json"


def test_a_wheel_loses_files_and_their_records(tmp_path):
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as made:
        for name in ("a/kept.py", "b/gone.so"):
            made.writestr(name, "x")
        made.writestr("a-1.dist-info/RECORD", "a/kept.py,,\nb/gone.so,,\n")
    wheels.drop(wheel, "b/")
    with zipfile.ZipFile(wheel) as left:
        assert left.namelist() == ["a/kept.py", "a-1.dist-info/RECORD"]
        assert left.read("a-1.dist-info/RECORD") == b"a/kept.py,,\n"


def test_the_wheels_leave_out_what_the_machine_has():
    found = wheels.needed()
    assert {"pytest", "nixl-cu13", "grpcio", "pydantic-core", "scikit-build-core"} <= found.keys()
    assert not {"torch", "numpy", "triton"} & found.keys()
