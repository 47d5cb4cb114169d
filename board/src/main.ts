// The page: takes lines in, draws a frame, reacts to the reader.

import { html, render } from "lit/html.js";
import { Board } from "./board";
import { Chart, GUTTER, type Mark, type Row, clock } from "./chart";
import { DARK, LIGHT, type Pixel, type Theme, hueOf } from "./colors";
import { Frames } from "./frames";
import { Levels, levelsAt } from "./levels";
import { type Actions, type Opened, type Served, controls, details, legend, signIn, summary, tables } from "./panels";
import type { Window } from "./raster";
import { DECODES, LANDS, type Request, STOPPED } from "./run";
import {
  type Explanation,
  Refused,
  type Settings,
  type Waterfall,
  change,
  embedded,
  explanation,
  follow,
  readFile,
  readText,
  servedModels,
  settings,
  waterfall,
} from "./source";
import "./style.css";

const PANELS_EVERY_MS = 250;
const AGAIN_MS = 2000;
/** A pointer that rests this long on a request asks for its waterfall. */
const REST_MS = 250;
/** A live stream is opened again after this time: the page then forgets what was before. */
const KEPT_MS = 3_600_000;
const KEY = "millrace-admin-key";
/** The most spans in view for which marks are looked for. */
const MOST_MARKED = 4000;

const element = (id: string): HTMLElement => document.getElementById(id) as HTMLElement;

class Page implements Actions {
  private readonly board = new Board();
  private readonly fleet = new Chart(element("fleet") as HTMLCanvasElement, 520, 3, 22);
  private readonly lines = new Chart(element("lines") as HTMLCanvasElement, 250, 2, 14);
  private readonly levels = new Levels(element("levels"));
  private readonly frames = new Frames();
  private readonly dark = matchMedia("(prefers-color-scheme: dark)");
  private key = sessionStorage.getItem(KEY) ?? "";
  private served: Served = { models: [], model: "" };
  private settings: Settings | null = null;
  private readonly opened: Opened = { worst: false, instances: false };
  private why: Explanation | null = null;
  /** Of the request that was shown last, as it was `at` that stage. */
  private fall: { id: string; at: string; found: Waterfall | null } = { id: "", at: "", found: null };
  private message = "";
  private asksKey = false;
  private stale = true;
  private drawn = 0;
  private panelsAt = 0;
  private live: AbortController | null = null;

  start(): void {
    this.dark.addEventListener("change", () => this.changed());
    new ResizeObserver(() => this.changed()).observe(document.body);
    for (const chart of [this.fleet, this.lines]) this.listen(chart);
    const recording = embedded();
    if (recording) this.show(() => readText(recording));
    else this.goLive();
    requestAnimationFrame((now) => this.frame(now));
  }

  // ---- where lines come from

  private show(read: () => ReturnType<typeof readText>): void {
    try {
      this.board.open(read());
      this.message = "";
    } catch (error) {
      this.message = `The recording can't be read: ${(error as Error).message}`;
    }
    this.changed();
  }

  openFile(file: File): void {
    this.live?.abort();
    readFile(file).then(
      (lines) => this.show(() => lines),
      (error: Error) => this.tell(`${file.name} can't be read: ${error.message}`),
    );
  }

  private async goLive(): Promise<void> {
    this.live?.abort();
    const live = (this.live = new AbortController());
    this.asksKey = false;
    while (!live.signal.aborted && !this.asksKey) {
      try {
        const models = await servedModels(this.key);
        const model = models.includes(this.served.model) ? this.served.model : models[0];
        if (live.signal.aborted) return;
        this.served = { models, model };
        const found = await settings(this.key, model);
        if (live.signal.aborted) return;
        this.settings = found;
        await follow(this.key, model, AbortSignal.any([live.signal, AbortSignal.timeout(KEPT_MS)]), (lines) => {
          this.message = "";
          this.board.hear(lines, performance.now());
          this.stale = true;
        });
        this.tell("The gateway ended the stream; it is opened again.");
      } catch (error) {
        if (live.signal.aborted) return;
        this.asksKey = error instanceof Refused && (error.status === 401 || error.status === 403);
        this.tell((error as Error).message);
      }
      if (!this.asksKey) await new Promise((done) => setTimeout(done, AGAIN_MS));
    }
  }

  signIn(key: string): void {
    this.key = key;
    sessionStorage.setItem(KEY, key);
    this.tell("");
    this.goLive();
  }

  serve(model: string): void {
    this.served = { ...this.served, model };
    this.goLive();
  }

  async explain(id: string): Promise<void> {
    try {
      this.why = await explanation(this.key, id);
      this.tell("");
    } catch (error) {
      this.tell((error as Error).message);
    }
  }

  /** Asks for the waterfall of the shown request, again whenever it has come further. */
  private askFall(request: Request): void {
    const at = `${request.ttft !== null} ${request.end !== Infinity}`;
    const { fall } = this;
    if (fall.id === request.id && fall.at === at) return;
    this.fall = { id: request.id, at, found: fall.id === request.id ? fall.found : null };
    const asked = this.fall;
    setTimeout(async () => {
      if (this.fall !== asked) return; // the pointer has moved on
      try {
        asked.found = await waterfall(this.key, request.id);
        this.changed();
      } catch (error) {
        this.tell((error as Error).message);
      }
    }, REST_MS);
  }

  async changeSetting(path: "scheduler" | "improvement-rate", body: object): Promise<void> {
    try {
      await change(this.key, this.served.model, path, body);
      this.settings = await settings(this.key, this.served.model);
      this.tell("");
    } catch (error) {
      this.tell(`The setting is as it was: ${(error as Error).message}`);
    }
  }

  private tell(message: string): void {
    this.message = message;
    this.changed();
  }

  changed(): void {
    this.stale = true;
    this.panelsAt = 0;
  }

  // ---- drawing

  private frame(now: number): void {
    const elapsed = this.frames.begin(now);
    this.board.advance(elapsed);
    const draws = this.stale || this.board.moves;
    if (draws) {
      this.stale = false;
      this.draw(now);
    }
    if (now - this.panelsAt >= PANELS_EVERY_MS) {
      this.panelsAt = now;
      this.panels(now);
    }
    this.frames.end(this.board.moves);
    requestAnimationFrame((next) => this.frame(next));
  }

  private get theme(): Theme {
    return this.dark.matches ? DARK : LIGHT;
  }

  private draw(now: number): void {
    const { board, theme } = this;
    const { run } = board;
    const view = board.window(now);
    const colour = this.colours(theme);
    const levels = (_: number, level: number): Pixel => theme.levels[level];
    const fleet: Row[] = run.ordered().map((one) => ({
      label: one.id,
      lanes:
        one.role === "prefill"
          ? [{ lane: one.blocks, colour }]
          : [
              { lane: one.level, colour: levels },
              { lane: one.blocks, colour },
            ],
    }));
    const name = (owner: number) => (owner < 0 ? "" : run.requests[owner].id);
    const few = this.drawn <= MOST_MARKED;
    const { colourBy, filter, shown } = board;
    const key = [run.shape, run.begun, this.dark.matches, colourBy, shown?.index, ...Object.values(filter)].join(" ");
    this.drawn = this.fleet.draw(fleet, few ? this.stops(fleet, view) : [], view, theme, name, key);
    const lines: Row[] = run.lifelines.map((lane) => ({
      label: "",
      lanes: [{ lane, colour: (owner, kind) => this.ofLifeline(run.requests[owner], kind, theme) }],
    }));
    this.lines.draw(lines, few ? this.tokens(view) : [], view, theme, name, key);
  }

  /** Returns the colours of chunks: all but the request in focus, or those of the filter, are dim. */
  private colours(theme: Theme): (owner: number, kind: number) => Pixel {
    const { board } = this;
    const { requests } = board.run;
    const focus = board.shown?.index ?? -1;
    const hues = theme.hues.length;
    if (focus < 0 && !board.filtered && board.colourBy === "request") return (owner) => theme.hues[owner % hues];
    return (owner) => {
      const request = requests[owner];
      if (focus >= 0 ? owner !== focus : board.filtered && !board.passes(request)) return theme.dimmed;
      if (board.colourBy === "request") return theme.hues[owner % hues];
      return theme.hues[hueOf(board.colourBy === "class" ? request.sloClass : request.tenant, hues)];
    };
  }

  private ofLifeline(request: Request, kind: number, theme: Theme): Pixel {
    const { board } = this;
    const focus = board.shown;
    if (focus ? request !== focus : board.filtered && !board.passes(request)) return theme.dimmed;
    const isLate = request.inTime === false && (kind === DECODES || kind === LANDS);
    return isLate ? theme.afterLate : theme.kinds[kind];
  }

  private stops(rows: Row[], view: Window): Mark[] {
    const marks: Mark[] = [];
    rows.forEach((row, index) => {
      const lane = row.lanes[row.lanes.length - 1].lane;
      lane.each(view.from, view.to, (span) => {
        if (lane.kind[span] === STOPPED) marks.push({ row: index, time: lane.end[span], kind: "stop" });
      });
    });
    return marks;
  }

  private tokens(view: Window): Mark[] {
    const marks: Mark[] = [];
    for (const one of this.board.run.requests) {
      if (one.arrival > view.to) break;
      if (one.end < view.from) continue;
      if (one.ttftSlo !== null) marks.push({ row: one.lane, time: one.arrival + one.ttftSlo, kind: "deadline" });
      if (one.ttft === null) continue;
      marks.push({ row: one.lane, time: one.arrival + one.ttft, kind: one.inTime === false ? "late" : "token" });
    }
    return marks;
  }

  private panels(now: number): void {
    const { board, theme } = this;
    const moment = board.now(now);
    render(controls(board, moment, this.served, this.settings, this), element("controls"));
    render(signIn(this.message, this.asksKey, this), element("message"));
    const said = summary(board, moment);
    render(html`${said}`, element("summary"));
    render(legend(theme), element("legend"));
    const askable = board.mode === "live";
    if (askable && board.shown) this.askFall(board.shown);
    const fall = askable && board.shown?.id === this.fall.id ? this.fall.found : null;
    const why = { askable, found: this.why, fall };
    render(details(board.shown, moment, why, this), element("details"));
    render(tables(board, moment, this.opened, this), element("tables"));
    render(html`${this.footer()}`, element("footer"));
    if (board.run.instances.size) this.levels.draw(board.run, board.window(now), theme);
    const rows = `${board.run.instances.size} instances over time`;
    element("fleet").setAttribute("aria-label", `${rows}. ${said}`);
    element("levels").setAttribute("aria-label", levelsAt(board.run, moment));
    element("lines").setAttribute("aria-label", `${board.run.requests.length} requests over time`);
    document.title = board.run.head?.title ? `${board.run.head.title} - Millrace` : "Millrace board";
  }

  private footer(): string {
    const { run } = this.board;
    const told = run.notices.at(-1);
    const from = run.head ? `${run.head.source}${run.head.title ? `: ${run.head.title}` : ""}` : "no run";
    return [
      from,
      `${run.requests.length} requests`,
      `${this.drawn} spans in view`,
      `frames: p95 ${this.frames.p95().toFixed(1)} ms, drawing ${this.frames.drawingP95().toFixed(1)} ms`,
      ...(told ? [`${clock(told.t)}: ${told.text}`] : []),
    ].join(" · ");
  }

  // ---- the reader's hands

  private listen(chart: Chart): void {
    const { canvas } = chart;
    let dragged: number | null = null;
    canvas.addEventListener("pointerdown", (event) => {
      dragged = event.clientX;
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointerup", (event) => {
      if (dragged !== null && Math.abs(event.clientX - dragged) < 3) this.board.selected = this.board.hovered;
      dragged = null;
      this.changed();
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.buttons && dragged !== null) {
        this.board.pan((dragged - event.clientX) * this.secondsPerPixel(canvas));
        dragged = event.clientX;
      } else this.board.hovered = this.under(chart, event);
      this.changed();
    });
    canvas.addEventListener("pointerleave", () => {
      this.board.hovered = null;
      this.changed();
    });
    canvas.addEventListener(
      "wheel",
      (event) => {
        if (!event.ctrlKey) return;
        event.preventDefault();
        const { time } = chart.at(event.offsetX, event.offsetY, this.view());
        this.board.zoom(1.0015 ** event.deltaY, time);
        this.changed();
      },
      { passive: false },
    );
    canvas.addEventListener("keydown", (event) => this.pressed(event));
  }

  private pressed(event: KeyboardEvent): void {
    const view = this.view();
    const span = view.to - view.from;
    const middle = Math.min(view.until, (view.from + view.to) / 2);
    const keys: Record<string, () => void> = {
      ArrowLeft: () => this.board.pan(-span / 10),
      ArrowRight: () => this.board.pan(span / 10),
      "+": () => this.board.zoom(0.7, middle),
      "=": () => this.board.zoom(0.7, middle),
      "-": () => this.board.zoom(1 / 0.7, middle),
      " ": () => this.board.play(),
      Home: () => this.board.showAll(),
      End: () => this.board.followEnd(),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
    this.changed();
  }

  private view(): Window {
    return this.board.window(performance.now());
  }

  private secondsPerPixel(canvas: HTMLCanvasElement): number {
    const view = this.view();
    return (view.to - view.from) / (canvas.clientWidth - GUTTER);
  }

  private under(chart: Chart, event: PointerEvent): Request | null {
    const { run } = this.board;
    const view = this.view();
    const { row, time } = chart.at(event.offsetX, event.offsetY, view);
    const lane = chart === this.fleet ? run.ordered()[row]?.blocks : run.lifelines[row];
    if (!lane || time > view.until || event.offsetX < GUTTER) return null;
    const span = lane.at(time);
    return span < 0 ? null : run.requests[lane.owner[span]];
  }
}

new Page().start();
