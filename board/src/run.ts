// A run: what the events say so far, kept so that any moment of it can be drawn.

import { type BoardEvent, FORMAT, type Head, type Line, type PlannedChunk, isHead } from "./events";
import { Lane, Series } from "./lane";

/** Kinds of spans. Instances have COMPUTES, STOPPED and LOST; lifelines have all but levels. */
export const WAITS = 0;
export const TURN = 1;
export const COMPUTES = 2;
export const STOPPED = 3; // computed, and then was suspended
export const LOST = 4;
export const LANDS = 5;
export const DECODES = 6;

export interface Instance {
  id: string;
  role: string;
  model: string;
  kvPages: number;
  takesWork: boolean;
  goneAt: number; // Infinity while it is there
  blocks: Lane;
  /** Its KV in use as spans of kind 0 to 255. */
  level: Lane;
  used: Series;
  running: Series;
  waiting: Series;
}

/** Where a chunk of a request computed, and how that ended. */
export interface Span {
  chunk: number;
  tokens: number;
  start: number;
  end: number;
  instances: string[];
  why: "" | "done" | "suspended" | "lost";
  by: string[];
}

export interface Request {
  index: number;
  id: string;
  sloClass: string;
  tenant: string;
  model: string;
  promptTokens: number;
  maxNewTokens: number;
  arrival: number;
  ttftSlo: number | null;
  predictedTtft: number | null;
  ttft: number | null;
  inTime: boolean | null;
  state: string;
  end: number; // Infinity while it lives
  message: string;
  kv: string[];
  plan: PlannedChunk[];
  attempts: number;
  spans: Span[];
  lane: number; // of the lifelines
}

interface Running {
  span: Span;
  blocks: [Lane, number][];
}

const ROLES = ["prefill", "mixed", "decode", "kvp"];
/** Seconds for which a lifeline's lane rests before another request gets it. */
const LANE_REST = 0.02;

export class FormatError extends Error {}

let runs = 0;

export class Run {
  /** Tells runs of one page apart. */
  readonly begun = runs++;
  head: Head | null = null;
  /** The writer's clock at the first event: all times of a run count from there. */
  origin: number | null = null;
  now = 0;
  policy = "";
  improvementRate = 0;
  readonly instances = new Map<string, Instance>();
  readonly requests: Request[] = [];
  readonly byId = new Map<string, Request>();
  readonly classes = new Set<string>();
  readonly tenants = new Set<string>();
  readonly lifelines: Lane[] = [];
  readonly queued = new Series();
  readonly preemptions = new Series();
  readonly kvShare = new Map<string, Series>(); // by role, 0 to 1
  readonly notices: { t: number; text: string }[] = [];
  /** Grows with every change of the rows. */
  shape = 0;
  private rows: Instance[] = [];
  private rowsOf = -1;
  private readonly running = new Map<string, Running>();
  private readonly segment = new Map<number, number>(); // of a live request's lifeline
  private readonly freeLanes: { lane: number; at: number }[] = [];
  private readonly pools = new Map<string, { used: number; pages: number }>(); // by role

  add(line: Line): void {
    if (isHead(line)) {
      if (line.millrace_board !== FORMAT) {
        throw new FormatError(`This page reads version ${FORMAT} of the board's lines, and this is ${line.millrace_board}.`);
      }
      this.head = line;
      return;
    }
    this.origin ??= line.t;
    line.t -= this.origin;
    this.now = Math.max(this.now, line.t);
    this.take(line);
  }

  /** Returns the instances as rows: by role, then by name. */
  ordered(): Instance[] {
    if (this.rowsOf !== this.shape) {
      const rank = (one: Instance) => (ROLES.indexOf(one.role) + ROLES.length) % ROLES.length;
      this.rows = [...this.instances.values()].sort(
        (a, b) => rank(a) - rank(b) || a.id.localeCompare(b.id, undefined, { numeric: true }),
      );
      this.rowsOf = this.shape;
    }
    return this.rows;
  }

  private take(event: BoardEvent): void {
    switch (event.kind) {
      case "instance":
        return this.instance(event);
      case "gone":
        return this.gone(event.id, event.t);
      case "usage":
        return this.usage(event);
      case "fleet":
        this.policy = event.policy;
        this.improvementRate = event.improvement_rate ?? 0;
        this.queued.add(event.t, event.queued ?? 0);
        this.preemptions.add(event.t, event.preemptions ?? 0);
        return;
      case "arrived":
        return this.arrived(event);
      case "notice":
        this.notices.push({ t: event.t, text: event.text });
        return;
    }
    const request = "id" in event ? this.byId.get(event.id) : undefined;
    if (request) this.ofRequest(request, event);
  }

  private ofRequest(request: Request, event: BoardEvent): void {
    switch (event.kind) {
      case "placed":
        request.kv = event.kv_ids ?? [];
        request.predictedTtft = event.predicted_ttft_s ?? request.predictedTtft;
        request.model = this.instances.get(request.kv[0])?.model ?? request.model;
        return;
      case "planned":
        request.plan = event.chunks ?? [];
        request.attempts = event.attempt ?? 1;
        return;
      case "runs":
        return this.runs(request, event.chunk ?? 0, event.tokens ?? 0, event.instances ?? [], event.t);
      case "stops":
        return this.stops(request, event.chunk ?? 0, event.why ?? "done", event.by ?? [], event.t);
      case "first_token":
        request.ttft = event.ttft_s;
        request.inTime = event.in_time ?? null;
        return;
      case "state":
        return this.state(request, event.state, event.message ?? "", event.t);
    }
  }

  // ---- instances

  private instance(event: BoardEvent & { kind: "instance" }): void {
    let found = this.instances.get(event.id);
    if (!found) {
      found = {
        id: event.id,
        role: event.role,
        model: "",
        kvPages: 0,
        takesWork: true,
        goneAt: Infinity,
        blocks: new Lane(),
        level: new Lane(),
        used: new Series(),
        running: new Series(),
        waiting: new Series(),
      };
      this.instances.set(event.id, found);
      this.shape++;
    }
    found.model = event.model ?? "";
    this.grow(found, event.kv_pages ?? 0);
    found.takesWork = event.takes_work ?? true;
    found.goneAt = Infinity;
  }

  private gone(id: string, t: number): void {
    const found = this.instances.get(id);
    if (!found) return;
    found.goneAt = t;
    found.takesWork = false;
    found.level.finishAll(t);
    this.uses(found, 0, t);
    this.grow(found, 0);
    found.running.add(t, 0);
    found.waiting.add(t, 0);
  }

  private usage(event: BoardEvent & { kind: "usage" }): void {
    const found = this.instances.get(event.id);
    if (!found) return;
    const used = event.used_pages ?? 0;
    if (used !== found.used.values.at(-1)) {
      found.level.finishAll(event.t);
      if (used) found.level.begin(event.t, -1, Math.round((255 * used) / Math.max(found.kvPages, 1)));
    }
    this.uses(found, used, event.t);
    found.running.add(event.t, event.running ?? 0);
    found.waiting.add(event.t, event.waiting ?? 0);
  }

  /** Notes that an instance's used pages have changed: its pool's share changes with them. */
  private uses(one: Instance, pages: number, t: number): void {
    const sum = this.pools.get(one.role) ?? { used: 0, pages: 0 };
    sum.used += pages - (one.used.values.at(-1) ?? 0);
    this.pools.set(one.role, sum);
    one.used.add(t, pages);
    let series = this.kvShare.get(one.role);
    if (!series) this.kvShare.set(one.role, (series = new Series()));
    series.add(t, sum.pages ? sum.used / sum.pages : 0);
  }

  private grow(one: Instance, pages: number): void {
    const sum = this.pools.get(one.role) ?? { used: 0, pages: 0 };
    sum.pages += pages - one.kvPages;
    this.pools.set(one.role, sum);
    one.kvPages = pages;
  }

  // ---- requests

  private arrived(event: BoardEvent & { kind: "arrived" }): void {
    const arrival = event.t - (event.since_s ?? 0);
    const request: Request = {
      index: this.requests.length,
      id: event.id,
      sloClass: event.slo_class ?? "default",
      tenant: event.tenant ?? "default",
      model: "",
      promptTokens: event.prompt_tokens ?? 0,
      maxNewTokens: event.max_new_tokens ?? 0,
      arrival,
      ttftSlo: event.ttft_slo_s ?? null,
      predictedTtft: null,
      ttft: null,
      inTime: null,
      state: "queued",
      end: Infinity,
      message: "",
      kv: [],
      plan: [],
      attempts: 0,
      spans: [],
      lane: this.lane(event.t),
    };
    this.requests.push(request);
    this.classes.add(request.sloClass);
    this.tenants.add(request.tenant);
    this.byId.set(request.id, request);
    this.turnTo(request, WAITS, event.t);
  }

  private lane(t: number): number {
    const free = this.freeLanes.findIndex((one) => one.at <= t);
    if (free >= 0) return this.freeLanes.splice(free, 1)[0].lane;
    this.lifelines.push(new Lane());
    this.shape++;
    return this.lifelines.length - 1;
  }

  /** Ends the present segment of the request's lifeline and begins one of another kind. */
  private turnTo(request: Request, kind: number, t: number): void {
    const lane = this.lifelines[request.lane];
    const before = this.segment.get(request.index);
    if (before !== undefined) {
      if (lane.kind[before] === kind) return;
      lane.finish(before, t);
    }
    this.segment.set(request.index, lane.begin(t, request.index, kind));
  }

  private runs(request: Request, chunk: number, tokens: number, instances: string[], t: number): void {
    const span: Span = { chunk, tokens, start: t, end: Infinity, instances, why: "", by: [] };
    request.spans.push(span);
    const blocks: [Lane, number][] = [];
    for (const id of instances) {
      const lane = this.instances.get(id)?.blocks;
      if (lane) blocks.push([lane, lane.begin(t, request.index, COMPUTES)]);
    }
    this.running.set(`${chunk} ${request.id}`, { span, blocks });
    this.turnTo(request, COMPUTES, t);
  }

  private stops(request: Request, chunk: number, why: Span["why"], by: string[], t: number): void {
    const key = `${chunk} ${request.id}`;
    const running = this.running.get(key);
    if (!running) return;
    this.running.delete(key);
    Object.assign(running.span, { end: t, why, by });
    for (const [lane, index] of running.blocks) {
      lane.finish(index, t);
      if (why === "suspended") lane.kind[index] = STOPPED;
      if (why === "lost") lane.kind[index] = LOST;
    }
    this.turnTo(request, TURN, t);
  }

  private state(request: Request, state: string, message: string, t: number): void {
    request.state = state;
    request.message = message || request.message;
    if (state === "queued") this.turnTo(request, WAITS, t);
    else if (state === "prefilling") this.turnTo(request, TURN, t);
    else if (state === "transferring") this.turnTo(request, LANDS, t);
    else if (state === "decoding") this.turnTo(request, DECODES, t);
    else {
      const open = this.segment.get(request.index);
      if (open === undefined) return;
      this.lifelines[request.lane].finish(open, t);
      this.segment.delete(request.index);
      this.freeLanes.push({ lane: request.lane, at: t + LANE_REST });
      this.freeLanes.sort((a, b) => a.lane - b.lane);
      request.end = t;
      this.byId.delete(request.id);
    }
  }
}
