// The lines of the queue and of the pools' KV in use, drawn by uPlot.

import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { GUTTER, clock } from "./chart";
import type { Theme } from "./colors";
import { css } from "./colors";
import type { Series } from "./lane";
import type { Run } from "./run";
import type { Window } from "./raster";

const HEIGHT = 120;

export class Levels {
  private plot: uPlot | null = null;
  private roles = "";
  private theme: Theme | null = null;

  constructor(private readonly place: HTMLElement) {}

  /** Draws the run's levels in the window. */
  draw(run: Run, view: Window, theme: Theme): void {
    const roles = [...run.kvShare.keys()];
    if (!this.plot || roles.join() !== this.roles || theme !== this.theme) this.make(roles, theme);
    const plot = this.plot as uPlot;
    const series = [run.queued, ...roles.map((role) => run.kvShare.get(role) as Series)];
    const times = [...new Set(series.flatMap((one) => one.times).concat(view.until))]
      .filter((time) => time <= view.until)
      .sort((a, b) => a - b);
    const data = [times, ...series.map((one, at) => times.map((time) => one.at(time) * (at ? 100 : 1)))];
    const width = this.place.clientWidth;
    if (plot.width !== width) plot.setSize({ width, height: HEIGHT });
    plot.batch(() => {
      plot.setData(data as uPlot.AlignedData, false);
      plot.setScale("x", { min: view.from, max: view.to });
    });
  }

  private make(roles: string[], theme: Theme): void {
    this.plot?.destroy();
    this.roles = roles.join();
    this.theme = theme;
    const axis = { stroke: theme.ink, grid: { stroke: theme.faint, width: 1 }, font: "11px system-ui, sans-serif" };
    const line = (label: string, scale: string, hue: number): uPlot.Series => ({
      label,
      scale,
      stroke: css(theme.hues[hue]),
      width: 1.5,
      points: { show: false },
      paths: uPlot.paths.stepped?.({ align: 1 }),
    });
    this.plot = new uPlot(
      {
        width: Math.max(this.place.clientWidth, 200),
        height: HEIGHT,
        legend: { live: false },
        padding: [6, 0, 0, 0],
        cursor: { show: false },
        scales: { x: { time: false }, count: { range: (_, __, most) => [0, Math.max(1, most)] }, share: { range: [0, 100] } },
        axes: [
          { ...axis, size: 28, values: (_, times, __, ___, step) => times.map((time) => clock(time, step)) },
          { ...axis, scale: "count", size: GUTTER, ticks: { size: 4 } },
        ],
        series: [{}, line("requests queued", "count", 5), ...roles.map((role, at) => line(`KV of ${role}, 0 to 100 %`, "share", at))],
      },
      [[], [], ...roles.map(() => [])] as uPlot.AlignedData,
      this.place,
    );
  }
}

/** Returns the levels at a moment in words. */
export function levelsAt(run: Run, moment: number): string {
  const shares = [...run.kvShare].map(([role, one]) => `KV of ${role} ${(100 * one.at(moment)).toFixed(0)} %`);
  return [`${run.queued.at(moment)} requests queued`, ...shares].join(", ");
}
