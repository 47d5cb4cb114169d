"""Draws a load test: the distribution of TTFT, and attainment over tighter objectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace.bench.common.report import RequestRecord
from millrace.sim.workload.workload import SloClass

SCALES = np.geomspace(0.1, 10.0, 81)


def attainment_at(
    records: Sequence[RequestRecord], slos: dict[str, SloClass], scale: float
) -> float:
    """Returns the share of `records`, 0 to 1, that attains objectives `scale` times as long."""
    scaled = {
        name: SloClass(
            name=name,
            ttft_s=None if slo.ttft_s is None else slo.ttft_s * scale,
            tbt_s=None if slo.tbt_s is None else slo.tbt_s * scale,
            e2e_s=None if slo.e2e_s is None else slo.e2e_s * scale,
        )
        for name, slo in slos.items()
    }
    met = sum(r.meets(scaled[r.class_name]) for r in records)
    return met / max(1, len(records))


def draw(records: Sequence[RequestRecord], classes: Sequence[SloClass], path: Path) -> None:
    """Writes a PNG: TTFT's CDF by class on the left, attainment over the SLO scale on the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for number, slo in enumerate(classes):
        colour = f"C{number}"
        own = [r for r in records if r.class_name == slo.name]
        ttft_ms = sorted(r.ttft_s * 1e3 for r in own if not r.error)
        if not ttft_ms:
            continue
        # Requests that failed never get a first token: their share is missing at the top.
        share = np.arange(1, len(ttft_ms) + 1) / len(own)
        left.step(ttft_ms, share, where="post", color=colour, label=slo.name)
        if slo.ttft_s is not None:
            left.axvline(slo.ttft_s * 1e3, color=colour, linestyle=":")
        if (slo.ttft_s, slo.tbt_s, slo.e2e_s) != (None, None, None):
            curve = [attainment_at(own, {slo.name: slo}, scale) for scale in SCALES]
            right.plot(SCALES, curve, color=colour, label=slo.name)
    left.set(xscale="log", ylim=(0, 1.02), xlabel="TTFT (ms); dotted: objective")
    left.set(ylabel="share of requests", title="Time to first token")
    right.set(xscale="log", ylim=(0, 1.02), xlabel="SLO scale (1: as given)")
    right.set(ylabel="share attaining", title="SLO attainment")
    right.axvline(1.0, color="grey", linestyle=":")
    right.axhline(0.9, color="grey", linestyle=":")
    for axes in (left, right):
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call] # matplotlib: untyped
