// Where lines come from: the gateway's stream of events, a file, or the page itself.

import { type Line, LineReader } from "./events";

export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

const headers = (key: string): HeadersInit => (key ? { authorization: `Bearer ${key}` } : {});

/** Returns the path of a route for one served model; "" means the first. */
const routeOf = (path: string, model: string): string => `admin/${path}${model && `?model=${encodeURIComponent(model)}`}`;

async function read<Found>(key: string, path: string): Promise<Found> {
  const answer = await fetch(path, { headers: headers(key) });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

async function failure(answer: Response): Promise<Refused> {
  const text = await answer.text();
  try {
    return new Refused(answer.status, JSON.parse(text).error.message);
  } catch {
    return new Refused(answer.status, text.slice(0, 200) || answer.statusText);
  }
}

/**
 * Reads a model's live events until the stream ends; then throws its reason. EventSource sends no
 * key, so the stream is read by fetch.
 */
export async function follow(
  key: string,
  model: string,
  signal: AbortSignal,
  take: (lines: Line[]) => void,
): Promise<void> {
  const path = routeOf("board/events", model);
  const answer = await fetch(path, { headers: headers(key), signal, cache: "no-store" });
  if (!answer.ok || !answer.body) throw await failure(answer);
  const lines = new LineReader();
  let rest = "";
  for await (const part of parts(answer.body)) {
    const events = (rest + part).split("\n\n");
    rest = events.pop() ?? "";
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: "));
      const text = data.map((line) => line.slice(6) + "\n").join("");
      if (event.startsWith("event: error")) throw new Error(JSON.parse(text).message);
      if (text) take([...lines.read(text)]);
    }
  }
}

async function* parts(body: ReadableStream<Uint8Array>): AsyncGenerator<string> {
  const reader = body.pipeThrough(new TextDecoderStream() as never).getReader() as ReadableStreamDefaultReader<string>;
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}

/** Reads a file that the reader chose; names that end in .gz are unpacked. */
export async function readFile(file: File): Promise<Line[]> {
  const body = file.stream() as ReadableStream<Uint8Array<ArrayBuffer>>;
  const plain = file.name.endsWith(".gz") ? body.pipeThrough(new DecompressionStream("gzip")) : body;
  return readText(await new Response(plain).text());
}

export function readText(text: string): Line[] {
  const lines = new LineReader();
  return [...lines.read(text), ...lines.end()];
}

/** Returns the recording that `millrace board` put into the page; empty in the gateway's page. */
export const embedded = (): string => document.getElementById("recording")?.textContent?.trim() ?? "";

/** Why a request waits, or waited: the fields of `GET /admin/requests/{id}` that the page shows. */
export interface Explanation {
  request_id: string;
  waits_for: string;
  waited: { reason: string; part: string; seconds: number }[];
  before: { request_id: string; key: string; seconds: number }[];
  helps: { what: string; saves_s: number }[];
}

export const explanation = (key: string, id: string): Promise<Explanation> =>
  read(key, `admin/requests/${encodeURIComponent(id)}`);

/** Where a request's time went: the fields of `GET /admin/requests/{id}/trace` that the page shows. */
export interface Waterfall {
  request_id: string;
  spans: { name: string; instance_id: string; start_s: number; end_s: number }[];
  more?: Waterfall[];
}

/** Returns null for a request that is open at another replica of the gateway, or that nobody knows. */
export async function waterfall(key: string, id: string): Promise<Waterfall | null> {
  const answer = await fetch(`admin/requests/${encodeURIComponent(id)}/trace`, { headers: headers(key) });
  if (answer.status === 404 || answer.status === 409) return null;
  if (!answer.ok) throw await failure(answer);
  const found: Waterfall = await answer.json();
  return [found, ...(found.more ?? [])].find((one) => one.request_id === id) ?? found;
}

// ---- the what-if switch: the gateway's own routes for administrators

export interface Settings {
  policy: string;
  policies: string[];
  improvement_rate: number;
}

export const settings = (key: string, model: string): Promise<Settings> => read(key, routeOf("scheduler", model));

/** Returns the names of the served models, the first model first. */
export const servedModels = async (key: string): Promise<string[]> =>
  (await read<{ models: string[] }>(key, "admin/models")).models;

export async function change(
  key: string,
  model: string,
  path: "scheduler" | "improvement-rate",
  body: object,
): Promise<void> {
  const answer = await fetch(routeOf(path, model), {
    method: "PUT",
    headers: { ...headers(key), "content-type": "application/json" },
    body: JSON.stringify(body),
  });
  if (!answer.ok) throw await failure(answer);
}
