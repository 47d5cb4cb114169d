"""Draws a load test: the distribution of TTFT, and attainment over tighter objectives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from millrace.bench.common.report import RequestRecord
from millrace.sim.results.plots import Panel, draw_panels
from millrace.sim.workload.workload import SloClass

Lines = dict[str, list[tuple[float, float]]]

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
    """Writes a PNG: TTFT's CDF by class on the left, attainment over the SLO scale on the right.
    Raises ConfigError for a bad path.
    """
    ttft: Lines = {}
    attained: Lines = {}
    objectives_ms = {slo.name: 1e3 * slo.ttft_s for slo in classes if slo.ttft_s is not None}
    for slo in classes:
        own = [r for r in records if r.class_name == slo.name]
        ttft_ms = sorted(r.ttft_s * 1e3 for r in own if not r.error)
        if not ttft_ms:
            continue
        # Requests that failed never get a first token: their share is missing at the top.
        ttft[slo.name] = [(ms, 100 * (n + 1) / len(own)) for n, ms in enumerate(ttft_ms)]
        if (slo.ttft_s, slo.tbt_s, slo.e2e_s) != (None, None, None):
            attained[slo.name] = [
                (scale, 100 * attainment_at(own, {slo.name: slo}, scale)) for scale in SCALES
            ]
    x = "TTFT (ms); dashed: objective"
    draw_panels(
        [
            [
                Panel("Time to first token", x, "%", ttft, log_x=True, edges=objectives_ms),
                Panel(
                    "SLO attainment", "SLO scale (1: as given)", "%", attained, log_x=True, mark=90
                ),
            ]
        ],
        path,
        (5.3, 4.0),
    )
