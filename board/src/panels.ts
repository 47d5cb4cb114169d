// All that is not a chart, as lit's templates.

import { type TemplateResult, html, nothing } from "lit/html.js";
import { type Board, type ColourBy, countAt, lateness } from "./board";
import { clock } from "./chart";
import { type Theme, css } from "./colors";
import { COMPUTES, DECODES, LANDS, type Request, TURN, WAITS } from "./run";
import type { Explanation, Settings, Waterfall } from "./source";

export interface Actions {
  changed(): void;
  openFile(file: File): void;
  signIn(key: string): void;
  explain(id: string): void;
  serve(model: string): void;
  changeSetting(path: "scheduler" | "improvement-rate", body: object): void;
}

/** The models of the gateway, and the one whose fleet is shown. */
export interface Served {
  models: string[];
  model: string;
}

const SPEEDS = [0.25, 1, 4, 16, 64];
const MOST_ROWS = 50;

const choice = (label: string, value: string, values: Iterable<string>, pick: (value: string) => void) => html`<label
  >${label}
  <select @change=${(event: Event) => pick((event.target as HTMLSelectElement).value)}>
    ${[...values].map((one) => html`<option value=${one} ?selected=${one === value}>${one || "all"}</option>`)}
  </select></label
>`;

const distinct = (values: Iterable<string>): string[] => ["", ...new Set([...values].filter(Boolean))].sort();

export function controls(
  board: Board,
  moment: number,
  served: Served,
  settings: Settings | null,
  actions: Actions,
): TemplateResult {
  const { run, filter } = board;
  const set = (change: () => void) => () => {
    change();
    actions.changed();
  };
  const pick = (name: keyof typeof filter) => (value: string) => set(() => (filter[name] = value))();
  return html`
    ${
      board.mode !== "replay" && served.models.length > 1
        ? choice("Served model", served.model, served.models, (value) => actions.serve(value))
        : nothing
    }
    ${board.mode === "replay" ? player(board, moment, set) : nothing}
    ${choice("Class", filter.sloClass, distinct(run.classes), pick("sloClass"))}
    ${choice("Key", filter.tenant, distinct(run.tenants), pick("tenant"))}
    ${choice("Model", filter.model, distinct([...run.instances.values()].map((one) => one.model)), pick("model"))}
    ${choice("Colour", board.colourBy, ["request", "class", "key"], (value) =>
      set(() => (board.colourBy = value as ColourBy))(),
    )}
    <button @click=${set(() => board.showAll())}>Whole run</button>
    <button aria-pressed=${board.follows} @click=${set(() => board.followEnd())}>Follow</button>
    ${board.mode === "live" && settings ? whatIf(settings, actions) : nothing}
    <label>Open <input type="file" accept=".jsonl,.gz" @change=${(event: Event) => {
      const file = (event.target as HTMLInputElement).files?.[0];
      if (file) actions.openFile(file);
    }} /></label>
  `;
}

function player(board: Board, moment: number, set: (change: () => void) => () => void): TemplateResult {
  return html`
    <button id="play" @click=${set(() => board.play())}>${board.playing ? "Stop" : "Play"}</button>
    ${choice("Speed", String(board.speed), SPEEDS.map(String), (value) => set(() => (board.speed = Number(value)))())}
    <label class="scrubber"
      >Time
      <input
        id="scrubber"
        type="range"
        min="0"
        max=${board.run.now}
        step="any"
        style="width: 75%"
        .value=${String(moment)}
        aria-valuetext=${clock(moment)}
        @input=${(event: Event) => set(() => board.scrub(Number((event.target as HTMLInputElement).value)))()}
    /></label>
  `;
}

function whatIf(settings: Settings, actions: Actions): TemplateResult {
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    const form = new FormData(event.target as HTMLFormElement);
    const policy = String(form.get("policy"));
    const rate = Number(form.get("rate"));
    if (policy !== settings.policy) actions.changeSetting("scheduler", { policy });
    if (rate !== settings.improvement_rate) actions.changeSetting("improvement-rate", { rate });
  };
  return html`<form id="what-if" @submit=${submit}>
    <label
      >Policy
      <select name="policy">
        ${settings.policies.map((one) => html`<option ?selected=${one === settings.policy}>${one}</option>`)}
      </select></label
    >
    <label
      >Improvement rate
      <input name="rate" type="number" min="0" max="1" step="any" .value=${String(settings.improvement_rate)}
    /></label>
    <button>Change</button>
  </form>`;
}

export function signIn(message: string, asksKey: boolean, actions: Actions): TemplateResult | typeof nothing {
  if (!message) return nothing;
  const submit = (event: SubmitEvent) => {
    event.preventDefault();
    actions.signIn(String(new FormData(event.target as HTMLFormElement).get("key")));
  };
  return html`${message}
  ${asksKey
    ? html`<form @submit=${submit}>
        <label>Admin key <input name="key" type="password" autocomplete="current-password" /></label>
        <button>Show</button>
      </form>`
    : nothing}`;
}

export function summary(board: Board, moment: number): string {
  const { run } = board;
  if (!run.instances.size) return board.mode === "live" ? "No instance is registered." : "";
  const counts = countAt(board, moment);
  const share = counts.judged ? `, ${((100 * counts.inTime) / counts.judged).toFixed(1)} % in time` : "";
  return [
    clock(moment),
    `${counts.waiting} wait`,
    `${counts.computing} compute`,
    `${counts.decoding} decode`,
    `${counts.firstTokens} first tokens${share}`,
    `${run.preemptions.at(moment)} preemptions`,
    `policy ${run.policy}`,
    `improvement rate ${run.improvementRate.toFixed(2)}`,
  ].join(" · ");
}

export function legend(theme: Theme): TemplateResult {
  const names: [number, string][] = [
    [WAITS, "waits for a place"],
    [TURN, "waits for its turn"],
    [COMPUTES, "computes"],
    [LANDS, "KV lands"],
    [DECODES, "decodes"],
  ];
  return html`${names.map(
    ([kind, name]) => html`<span><i style="background:${css(theme.kinds[kind])}"></i>${name}</span>`,
  )}<span><i style="background:${css(theme.afterLate)}"></i>after a late first token</span><span>● first token (red: late)</span><span>│ objective</span>`;
}

// ---- details of a request

export interface Why {
  /** Whether a gateway can be asked. */
  askable: boolean;
  found: Explanation | null;
  /** Where the time of the shown request went, as far as the gateway knows. */
  fall: Waterfall | null;
}

export function details(request: Request | null, moment: number, why: Why, actions: Actions): TemplateResult {
  if (!request) return html`<h2>Request</h2><p>Point at a chunk, or choose a request in the table.</p>`;
  const rows: [string, string | TemplateResult][] = [
    ["class", request.sloClass],
    ["key", request.tenant],
    ["model", request.model || "-"],
    ["prompt", `${request.promptTokens.toLocaleString("en")} tokens, answer at most ${request.maxNewTokens}`],
    ["state", request.end <= moment || request.end === Infinity ? request.state : "in progress"],
    ["arrived", clock(request.arrival, 0.001)],
    ["TTFT", ttft(request)],
    ["KV at", request.kv.join(", ") || "-"],
    ["attempts", String(request.attempts)],
  ];
  if (request.message) rows.push(["why", request.message]);
  const last = Math.max(...request.spans.map((span) => Math.min(span.end, moment)), request.arrival + 1e-6);
  return html`<h2>Request</h2>
    <strong>${request.id}</strong>
    <dl>${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
    ${why.askable ? html`<button id="why" @click=${() => actions.explain(request.id)}>Why?</button>` : nothing}
    ${why.found?.request_id === request.id ? explained(why.found) : nothing}
    ${why.fall ? timeOf(why.fall) : nothing}
    ${request.plan.length
      ? html`<h2>Plan</h2>
          <ul class="fall">
            ${request.plan.map(
              (chunk) => html`<li>
                chunk ${chunk.index}: ${chunk.num_tokens.toLocaleString("en")} tokens on
                ${chunk.instance_ids.length} (${chunk.instance_ids.join(", ")})
              </li>`,
            )}
          </ul>`
      : nothing}
    ${request.spans.length
      ? html`<h2>Computed</h2>
          <ul class="fall">
            ${request.spans.map((span) => bar(request, span, last, moment))}
          </ul>`
      : nothing}`;
}

function explained(found: Explanation): TemplateResult {
  const list = (title: string, lines: string[]) =>
    lines.length ? html`<h2>${title}</h2><ul class="fall">${lines.map((line) => html`<li>${line}</li>`)}</ul>` : nothing;
  const seconds = (value: number) => `${value.toPrecision(3)} s`;
  return html`
    ${list("Waits for", found.waits_for ? [found.waits_for] : [])}
    ${list("Time until its first token", found.waited.map((one) => `${seconds(one.seconds)} for ${one.reason}`))}
    ${list("Before it", found.before.map((one) => `${one.request_id}, ${seconds(one.seconds)} (${one.key})`))}
    ${list("Would help, at most", found.helps.map((one) => `${seconds(one.saves_s)}: ${one.what}`))}
  `;
}

function timeOf(fall: Waterfall): TemplateResult {
  const whole = Math.max(...fall.spans.map((span) => span.end_s), 1e-6);
  const spans = [...fall.spans].sort((a, b) => a.start_s - b.start_s || a.end_s - b.end_s);
  return html`<h2>Where its time went</h2>
    <ul class="fall" id="waterfall">
      ${spans.map(
        (span) => html`<li>
          ${span.name}, ${(1e3 * (span.end_s - span.start_s)).toFixed(1)} ms, ${span.instance_id}
          <b
            style="margin-left:${(100 * span.start_s) / whole}%;width:${(100 * (span.end_s - span.start_s)) / whole}%"
          ></b>
        </li>`,
      )}
    </ul>`;
}

function bar(request: Request, span: Request["spans"][number], last: number, moment: number): TemplateResult {
  const whole = last - request.arrival;
  const left = (100 * (span.start - request.arrival)) / whole;
  const end = Math.min(span.end, moment);
  const ends = { "": "computes", done: "done", suspended: "suspended", lost: "lost" }[span.why];
  const by = span.by.length ? ` by ${span.by.join(", ")}` : "";
  return html`<li>
    chunk ${span.chunk}, ${Math.max(end - span.start, 0).toFixed(3)} s, ${span.instances.length}
    ${span.instances.length === 1 ? "instance" : "instances"}, ${ends}${by}
    <b style="margin-left:${left}%;width:${(100 * Math.max(end - span.start, 0)) / whole}%"></b>
  </li>`;
}

function ttft(request: Request): TemplateResult {
  const parts = [request.ttft === null ? "none so far" : `${request.ttft.toFixed(3)} s`];
  if (request.ttftSlo !== null) parts.push(`objective ${request.ttftSlo.toFixed(3)} s`);
  if (request.predictedTtft !== null) parts.push(`predicted ${request.predictedTtft.toFixed(3)} s`);
  return html`<span class=${request.inTime === false ? "late" : ""}>${parts.join(", ")}</span>`;
}

// ---- the same as the charts, in words

/** What the reader has opened: closed tables are not made. */
export interface Opened {
  worst: boolean;
  instances: boolean;
}

export function tables(board: Board, moment: number, opened: Opened, actions: Actions): TemplateResult {
  const toggle = (name: keyof Opened) => (event: Event) => {
    opened[name] = (event.target as HTMLDetailsElement).open;
    actions.changed();
  };
  return html`
    <details id="worst" @toggle=${toggle("worst")}>
      <summary>Requests with the highest TTFT against their objective</summary>
      ${opened.worst ? worstRequests(board, moment, actions) : nothing}
    </details>
    <details id="instances" @toggle=${toggle("instances")}>
      <summary>Instances</summary>
      ${opened.instances ? instances(board, moment) : nothing}
    </details>
  `;
}

function worstRequests(board: Board, moment: number, actions: Actions): TemplateResult {
  const worst = board.run.requests
    .filter((one) => one.arrival <= moment && board.passes(one))
    .map((one) => ({ one, ratio: lateness(one, moment) }))
    .sort((a, b) => b.ratio - a.ratio)
    .slice(0, MOST_ROWS);
  const select = (request: Request) => () => {
    board.selected = request;
    actions.changed();
  };
  return html`<table>
    <thead>
      <tr>${["request", "class", "key", "tokens", "TTFT s", "TTFT/SLO", "state"].map((name) => html`<th>${name}</th>`)}</tr>
    </thead>
    <tbody>
      ${worst.map(
        ({ one, ratio }) => html`<tr>
          <td><button @click=${select(one)}>${one.id}</button></td>
          <td>${one.sloClass}</td>
          <td>${one.tenant}</td>
          <td>${one.promptTokens}</td>
          <td>${one.ttft === null ? "-" : one.ttft.toFixed(3)}</td>
          <td class=${ratio > 1 ? "late" : ""}>${ratio ? ratio.toFixed(2) : "-"}</td>
          <td>${one.state}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}

function instances(board: Board, moment: number): TemplateResult {
  return html`<table>
    <thead>
      <tr>${["instance", "role", "takes work", "running", "waiting", "pages used"].map((name) => html`<th>${name}</th>`)}</tr>
    </thead>
    <tbody>
      ${board.run.ordered().map(
        (one) => html`<tr>
          <td>${one.id}</td>
          <td>${one.role}</td>
          <td>${one.goneAt <= moment ? "gone" : one.takesWork ? "yes" : "no"}</td>
          <td>${one.running.at(moment)}</td>
          <td>${one.waiting.at(moment)}</td>
          <td>${one.used.at(moment)} of ${one.kvPages}</td>
        </tr>`,
      )}
    </tbody>
  </table>`;
}
