"""The transfer benchmark runs between two real processes and reports its own settings."""

from __future__ import annotations

import io
import json

from rich.console import Console

from millrace.bench.transfer import run as transfer
from millrace.bench.transfer.report import print_tables


def test_a_small_run_reports_every_case(monkeypatch):
    monkeypatch.setattr(transfer, "STREAM_MIB", 8)
    steps = []
    report = transfer.run(
        transfer.Settings(sizes_mib=(2,), repeats=1, in_flight=2, overlap_mib=2, layer_ms=0.2),
        on_progress=lambda done, total, what: steps.append((done, total, what)),
    )
    assert json.loads(json.dumps(report)) == report
    assert [(r["pages"], r["mode"]) for r in report["rates"]] == [
        ("contiguous", "buffer-free"),
        ("scattered", "buffer-free"),
        ("contiguous", "buffered"),
        ("contiguous", "checked"),
        ("scattered", "checked"),
    ]
    for rate in report["rates"]:
        assert rate["bytes"] == 2 << 20
        for shape in ("one", "stream"):  # of a single repetition
            expected = rate[f"{shape}_bytes_per_s"] / rate[f"{shape}_bare_bytes_per_s"]
            assert abs(rate[f"{shape}_ratio"] / expected - 1) < 1e-9
    assert [o["mode"] for o in report["overlap"]] == ["buffer-free", "buffered", "checked"]
    assert all(o["at_end_ms"] > 0 and o["compute_ms"] > 0 for o in report["overlap"])
    assert [done for done, _, _ in steps] == list(range(8)) and steps[-1][1] == 8
    console = Console(width=120, record=True, file=io.StringIO())
    print_tables(report, console)
    assert "buffer-free" in console.export_text()
