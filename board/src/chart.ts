// A canvas of lanes over time: the instances' board, or the requests' lifelines.

import type { Pixel, Theme } from "./colors";
import type { Lane } from "./lane";
import { type Window, paintLane } from "./raster";

export interface Row {
  label: string;
  /** Drawn one over the other. */
  lanes: { lane: Lane; colour: (owner: number, kind: number) => Pixel }[];
}

/** A mark on a row, such as a first token. */
export interface Mark {
  row: number;
  time: number;
  kind: "token" | "late" | "deadline" | "stop";
}

export const GUTTER = 76; // pixels of CSS, for the labels of the rows
const AXIS = 18;
/** Rows of at least this height have borders, labels and marks. */
const DETAILED = 8;
/** Rows of at least this height have names on their spans. */
const NAMED = 12;
/** Spans of at least this width, in pixels, have names. */
const LEAST_NAMED = 20;
/** The most spans that get borders and names of their own. */
const MOST_DETAILED = 4000;

/** While the window rests, only what came since the last frame is painted, and so many seconds before:
 * a live run's events come late. */
const LATE_S = 2;
/** All is painted again after this time. */
const AGAIN_MS = 2000;

/** What the raster holds. */
interface Painted {
  key: string;
  view: Window;
  spans: number;
  atMs: number;
}

export class Chart {
  private painted: Painted | null = null;
  private readonly context: CanvasRenderingContext2D;
  private readonly raster = document.createElement("canvas");
  private image: ImageData | null = null;
  rowHeight = 12;

  constructor(
    readonly canvas: HTMLCanvasElement,
    private readonly height: number,
    private readonly leastRow: number,
    private readonly mostRow: number,
  ) {
    const context = canvas.getContext("2d", { alpha: false });
    if (!context) throw new Error("this browser draws no canvas");
    this.context = context;
  }

  /** Draws all; returns how many spans are in view. `key` changes with the rows and their colours. */
  draw(rows: Row[], marks: Mark[], view: Window, theme: Theme, name: (owner: number) => string, key: string): number {
    const ratio = window.devicePixelRatio || 1;
    this.fit(rows.length, ratio);
    const { context, canvas } = this;
    const width = Math.max(1, canvas.width - Math.round(GUTTER * ratio));
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.fillStyle = theme.groundCss;
    context.fillRect(0, 0, canvas.width, canvas.height);
    const drawn = this.paint(rows, view, theme, width, ratio, key);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.axis(view, theme, width / ratio);
    this.separate(rows.length, theme, width / ratio);
    this.label(rows, theme);
    if (drawn <= MOST_DETAILED && this.rowHeight >= DETAILED) this.detail(rows, view, theme, width / ratio, name);
    this.mark(marks, view, theme, width / ratio);
    return drawn;
  }

  /** Returns the row and the time under a point of the canvas, in CSS pixels. */
  at(x: number, y: number, view: Window): { row: number; time: number } {
    const width = this.canvas.clientWidth - GUTTER;
    return {
      row: Math.floor((y - AXIS) / this.rowHeight),
      time: view.from + ((x - GUTTER) / width) * (view.to - view.from),
    };
  }

  private fit(rows: number, ratio: number): void {
    const room = (this.height - AXIS) / Math.max(rows, 1);
    this.rowHeight = Math.max(this.leastRow, Math.min(this.mostRow, Math.floor(room)));
    const height = AXIS + Math.max(rows, 1) * this.rowHeight;
    const width = this.canvas.clientWidth;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.style.height = `${height}px`;
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
    }
  }

  private paint(rows: Row[], view: Window, theme: Theme, width: number, ratio: number, key: string): number {
    if (!rows.length) return 0;
    if (this.image?.width !== width || this.image.height !== rows.length) {
      this.raster.width = width;
      this.raster.height = rows.length;
      this.image = new ImageData(width, rows.length);
      this.painted = null;
    }
    this.fill(new Uint32Array(this.image.data.buffer), rows, view, theme, width, key);
    this.raster.getContext("2d")?.putImageData(this.image, 0, 0);
    this.context.imageSmoothingEnabled = false;
    const height = rows.length * this.rowHeight * ratio;
    this.context.drawImage(this.raster, 0, 0, width, rows.length, GUTTER * ratio, AXIS * ratio, width, height);
    return this.painted?.spans ?? 0;
  }

  private fill(pixels: Uint32Array, rows: Row[], view: Window, theme: Theme, width: number, key: string): void {
    const { painted } = this;
    const atMs = performance.now();
    const rests =
      painted?.key === key &&
      painted.view.from === view.from &&
      painted.view.to === view.to &&
      painted.view.until <= view.until &&
      atMs - painted.atMs < AGAIN_MS;
    const since = rests ? Math.max(view.from, painted.view.until - LATE_S) : view.from;
    const first = Math.floor(((since - view.from) * width) / (view.to - view.from));
    let spans = 0;
    rows.forEach((row, index) => {
      if (first < width) pixels.fill(theme.ground, index * width + first, (index + 1) * width);
      for (const { lane, colour } of row.lanes) spans += paintLane(pixels, width, index, lane, view, colour, since);
    });
    this.painted = rests ? { ...painted, view } : { key, view, spans, atMs };
  }

  private axis(view: Window, theme: Theme, width: number): void {
    const { context } = this;
    context.fillStyle = theme.ink;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "center";
    const step = tickStep((view.to - view.from) / Math.max(width / 110, 1));
    for (let time = Math.ceil(view.from / step) * step; time < view.to; time += step) {
      const x = GUTTER + ((time - view.from) / (view.to - view.from)) * width;
      context.fillText(clock(time, step), x, AXIS / 2);
      context.fillRect(x, AXIS - 4, 1, 4);
    }
  }

  /** A line of the ground between the rows, so that neighbours in one colour are told apart. */
  private separate(rows: number, theme: Theme, width: number): void {
    if (this.rowHeight < 4) return;
    this.context.fillStyle = theme.groundCss;
    for (let row = 1; row <= rows; row++) {
      this.context.fillRect(GUTTER, AXIS + row * this.rowHeight - 1, width, 1);
    }
  }

  private label(rows: Row[], theme: Theme): void {
    const { context } = this;
    const every = Math.ceil(12 / this.rowHeight);
    context.fillStyle = theme.ink;
    context.textAlign = "right";
    for (let row = 0; row < rows.length; row += every) {
      if (!rows[row].label) continue;
      context.fillText(rows[row].label, GUTTER - 6, AXIS + (row + 0.5) * this.rowHeight, GUTTER - 8);
    }
  }

  /** Borders between spans, and names where they fit. */
  private detail(rows: Row[], view: Window, theme: Theme, width: number, name: (owner: number) => string): void {
    const { context } = this;
    const scale = width / (view.to - view.from);
    const to = Math.min(view.to, view.until);
    context.textAlign = "left";
    context.font = `${Math.min(11, this.rowHeight - 2)}px system-ui, sans-serif`;
    rows.forEach((row, number) => {
      const lane = row.lanes.at(-1)?.lane;
      lane?.each(view.from, to, (index) => {
        const left = GUTTER + Math.max(0, (lane.start[index] - view.from) * scale);
        const right = GUTTER + (Math.min(lane.end[index], to) - view.from) * scale;
        context.fillStyle = theme.groundCss;
        if (right - left > 3) context.fillRect(right - 1, AXIS + number * this.rowHeight, 1, this.rowHeight);
        if (this.rowHeight < NAMED || right - left < LEAST_NAMED || lane.owner[index] < 0) return;
        const shown = shortened(name(lane.owner[index]), right - left - 6, (text) => context.measureText(text).width);
        context.fillStyle = "#fff";
        context.fillText(shown, left + 3, AXIS + (number + 0.5) * this.rowHeight);
      });
    });
  }

  private mark(marks: Mark[], view: Window, theme: Theme, width: number): void {
    const { context } = this;
    const colours = { token: theme.ink, late: theme.late, deadline: theme.ink, stop: theme.late };
    for (const { row, time, kind } of marks) {
      if (time < view.from || time > Math.min(view.to, view.until + (kind === "deadline" ? Infinity : 0))) continue;
      const x = GUTTER + ((time - view.from) / (view.to - view.from)) * width;
      const y = AXIS + row * this.rowHeight;
      context.fillStyle = colours[kind];
      if (kind === "deadline") context.fillRect(x, y, 1, this.rowHeight - 1);
      else if (kind === "stop") context.fillRect(x - 1, y + this.rowHeight / 2, 1, this.rowHeight / 2 - 1);
      else {
        context.beginPath();
        context.arc(x, y + this.rowHeight / 2, Math.min(3, this.rowHeight / 2), 0, 7);
        context.fill();
      }
    }
  }
}

/** Returns as much of the end of a name as fits: the ends tell names apart. */
export function shortened(name: string, room: number, widthOf: (text: string) => number): string {
  for (let cut = 0; cut < name.length; cut++) {
    const text = cut ? `…${name.slice(cut)}` : name;
    if (widthOf(text) <= room) return text;
  }
  return "";
}

/** Returns a round step of 1, 2 or 5 times a power of ten that is at least `least`. */
export function tickStep(least: number): number {
  const power = 10 ** Math.floor(Math.log10(least));
  return (([1, 2, 5, 10].find((times) => times * power >= least * 0.999) ?? 10) as number) * power;
}

/** Returns a time of a run as text: seconds, or minutes and seconds from 2 minutes on. */
export function clock(time: number, step = 0.1): string {
  const digits = step >= 1 ? 0 : Math.min(3, Math.ceil(-Math.log10(step)));
  const whole = Math.abs(time);
  if (whole < 120) return `${time.toFixed(digits)} s`;
  const seconds = (whole % 60).toFixed(digits).padStart(digits ? 3 + digits : 2, "0");
  return `${time < 0 ? "-" : ""}${Math.floor(whole / 60)}:${seconds}`;
}
