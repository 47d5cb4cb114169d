// The state of the page: the run, the moment and the window that are shown, filters, the selection.

import type { Line } from "./events";
import { isHead } from "./events";
import { type Request, Run } from "./run";
import type { Window } from "./raster";

export type Mode = "empty" | "live" | "replay";
export type ColourBy = "request" | "class" | "key";

export interface Filter {
  sloClass: string;
  tenant: string;
  model: string;
}

const LIVE_SPAN_S = 60;
const LEAST_SPAN_S = 0.01;
/** Room after the present moment, as a share of the window. */
const AHEAD = 0.03;

export class Board {
  run = new Run();
  mode: Mode = "empty";
  playing = false;
  speed = 1;
  follows = true;
  colourBy: ColourBy = "request";
  filter: Filter = { sloClass: "", tenant: "", model: "" };
  selected: Request | null = null;
  hovered: Request | null = null;
  private from = 0;
  private span = LIVE_SPAN_S;
  private moment = 0; // that a replay has reached
  private heardAt = 0; // by the page's clock, ms

  /** Takes lines of a live run, at a time of the page's clock. */
  hear(lines: Line[], atMs: number): void {
    for (const line of lines) {
      if (isHead(line)) this.start("live");
      this.run.add(line);
    }
    this.heardAt = atMs;
  }

  /** Opens a whole run, and shows all of it. */
  open(lines: Line[]): void {
    this.start("replay");
    for (const line of lines) this.run.add(line);
    this.moment = this.run.now;
    this.showAll();
  }

  private start(mode: Mode): void {
    this.run = new Run();
    this.mode = mode;
    this.playing = false;
    this.follows = true;
    this.span = LIVE_SPAN_S;
    this.selected = this.hovered = null;
  }

  /** Moves a replay on by what the page's clock moved, in ms. */
  advance(elapsedMs: number): void {
    if (!this.playing) return;
    this.moment = Math.min(this.run.now, this.moment + (elapsedMs / 1000) * this.speed);
    if (this.moment >= this.run.now) this.playing = false;
  }

  /** Returns the moment that is shown, in seconds of the run. */
  now(atMs: number): number {
    if (this.mode !== "live") return this.moment;
    return this.run.now + Math.max(0, atMs - this.heardAt) / 1000;
  }

  /** Returns whether the picture changes by itself. */
  get moves(): boolean {
    return this.mode === "live" || this.playing;
  }

  window(atMs: number): Window {
    const until = this.now(atMs);
    if (this.follows) this.from = Math.max(until - this.span * (1 - AHEAD), this.mode === "live" ? -Infinity : 0);
    return { from: this.from, to: this.from + this.span, until };
  }

  // ---- moving

  scrub(moment: number): void {
    this.moment = Math.max(0, Math.min(this.run.now, moment));
    if (!this.follows && (this.moment < this.from || this.moment > this.from + this.span)) this.follows = true;
  }

  play(): void {
    if (this.mode !== "replay") return;
    if (!this.playing && this.moment >= this.run.now) this.moment = 0;
    this.playing = !this.playing;
  }

  pan(seconds: number): void {
    this.follows = false;
    this.from += seconds;
  }

  /** Zooms by a factor (less than 1: closer) around a time. */
  zoom(factor: number, around: number): void {
    const span = Math.max(LEAST_SPAN_S, Math.min(this.span * factor, Math.max(this.run.now * 2, LIVE_SPAN_S)));
    this.from = around - (around - this.from) * (span / this.span);
    this.span = span;
    this.follows = false;
  }

  showAll(): void {
    this.follows = false;
    this.from = 0;
    this.span = Math.max(this.run.now * (1 + AHEAD), 1);
  }

  followEnd(): void {
    this.follows = true;
    this.span = Math.min(this.span, LIVE_SPAN_S);
    if (this.mode === "replay") this.moment = this.run.now;
  }

  // ---- filters and the selection

  get filtered(): boolean {
    return Boolean(this.filter.sloClass || this.filter.tenant || this.filter.model);
  }

  passes(request: Request): boolean {
    const { sloClass, tenant, model } = this.filter;
    return (
      (!sloClass || request.sloClass === sloClass) &&
      (!tenant || request.tenant === tenant) &&
      (!model || request.model === model)
    );
  }

  /** Returns the request that the details are of. */
  get shown(): Request | null {
    return this.hovered ?? this.selected;
  }
}

export interface Counts {
  waiting: number;
  computing: number;
  decoding: number;
  firstTokens: number;
  judged: number;
  inTime: number;
}

/** Counts the requests that pass the filter, at a moment. */
export function countAt(board: Board, moment: number): Counts {
  const found = { waiting: 0, computing: 0, decoding: 0, firstTokens: 0, judged: 0, inTime: 0 };
  for (const request of board.run.requests) {
    if (request.arrival > moment) break;
    if (!board.passes(request)) continue;
    const hasToken = request.ttft !== null && request.arrival + request.ttft <= moment;
    if (hasToken) found.firstTokens++;
    if (hasToken && request.inTime !== null) {
      found.judged++;
      if (request.inTime) found.inTime++;
    }
    if (request.end <= moment) continue;
    if (hasToken) found.decoding++;
    else if (request.spans.some((span) => span.start <= moment && moment < span.end)) found.computing++;
    else found.waiting++;
  }
  return found;
}

/** Returns TTFT so far over its objective; 0 without one. */
export function lateness(request: Request, moment: number): number {
  if (request.ttftSlo === null) return 0;
  const ttft = request.ttft ?? Math.min(request.end, moment) - request.arrival;
  return Math.min(ttft, moment - request.arrival) / request.ttftSlo;
}
