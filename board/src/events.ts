// The lines of the board, as services/millrace/core/board/events.py defines them.

export const FORMAT = 1;

export interface Head {
  millrace_board: number;
  source: "live" | "recording" | "simulation";
  title?: string;
  zero_unix_s?: number;
}

export interface PlannedChunk {
  index: number;
  start_token: number;
  num_tokens: number;
  instance_ids: string[];
}

export type BoardEvent = { t: number } & (
  | { kind: "instance"; id: string; role: string; model?: string; kv_pages?: number; takes_work?: boolean }
  | { kind: "gone"; id: string }
  | { kind: "usage"; id: string; used_pages?: number; running?: number; waiting?: number; queue_s?: number }
  | { kind: "fleet"; policy: string; improvement_rate?: number; queued?: number; queued_s?: number; preemptions?: number }
  | {
      kind: "arrived";
      id: string;
      slo_class?: string;
      tenant?: string;
      prompt_tokens?: number;
      max_new_tokens?: number;
      ttft_slo_s?: number;
      since_s?: number;
    }
  | { kind: "placed"; id: string; kv_ids?: string[]; predicted_ttft_s?: number }
  | { kind: "planned"; id: string; attempt?: number; chunks?: PlannedChunk[] }
  | { kind: "runs"; id: string; chunk?: number; tokens?: number; instances?: string[] }
  | { kind: "stops"; id: string; chunk?: number; why?: "done" | "suspended" | "lost"; by?: string[] }
  | { kind: "state"; id: string; state: string; message?: string }
  | { kind: "first_token"; id: string; ttft_s: number; in_time?: boolean }
  | { kind: "notice"; text: string }
);

export type Line = Head | BoardEvent;

export const isHead = (line: Line): line is Head => "millrace_board" in line;

/** Cuts text that comes in parts into objects. A line that is not whole waits for its rest. */
export class LineReader {
  private rest = "";

  *read(part: string): Generator<Line> {
    const lines = (this.rest + part).split("\n");
    this.rest = lines.pop() ?? "";
    for (const line of lines) {
      if (line.trim()) yield JSON.parse(line) as Line;
    }
  }

  /** The last line may lack its end; a line that was cut is left out. */
  *end(): Generator<Line> {
    const rest = this.rest;
    this.rest = "";
    try {
      if (rest.trim()) yield JSON.parse(rest) as Line;
    } catch {
      // its writer was stopped while it wrote
    }
  }
}
