import { describe, expect, test } from "vitest";
import { Board, countAt, lateness } from "../src/board";
import { clock, shortened, tickStep } from "../src/chart";
import { type Line, LineReader } from "../src/events";
import { percentile } from "../src/frames";
import { Lane, Series } from "../src/lane";
import { paintLane } from "../src/raster";
import { COMPUTES, DECODES, FormatError, LANDS, LOST, Run, STOPPED, TURN, WAITS } from "../src/run";

const HEAD: Line = { millrace_board: 1, source: "simulation", title: "t" };

/** Two prefill instances and a decode instance; a request computed in two spans on two instances. */
const story = (): Line[] => [
  { ...HEAD },
  { t: 100, kind: "instance", id: "p10", role: "prefill", kv_pages: 10 },
  { t: 100, kind: "instance", id: "p2", role: "prefill", kv_pages: 10 },
  { t: 100, kind: "instance", id: "d0", role: "decode", model: "m", kv_pages: 10 },
  { t: 100, kind: "fleet", policy: "edf" },
  { t: 101, kind: "arrived", id: "r", slo_class: "chat", tenant: "a", prompt_tokens: 64, ttft_slo_s: 2 },
  { t: 101, kind: "placed", id: "r", kv_ids: ["d0"], predicted_ttft_s: 1.5 },
  { t: 101, kind: "state", id: "r", state: "queued" },
  { t: 101.5, kind: "state", id: "r", state: "prefilling" },
  { t: 102, kind: "runs", id: "r", tokens: 64, instances: ["p2", "p10"] },
  { t: 103, kind: "stops", id: "r", why: "suspended", by: ["s"] },
  { t: 104, kind: "runs", id: "r", tokens: 64, instances: ["p2", "p10"] },
  { t: 104.5, kind: "stops", id: "r" },
  { t: 104.5, kind: "first_token", id: "r", ttft_s: 3.5, in_time: false },
  { t: 104.5, kind: "state", id: "r", state: "transferring" },
  { t: 105, kind: "usage", id: "d0", used_pages: 5, running: 1 },
  { t: 105, kind: "state", id: "r", state: "decoding" },
  { t: 107, kind: "state", id: "r", state: "finished" },
];

const told = (lines: Line[]): Run => {
  const run = new Run();
  for (const line of lines) run.add(line);
  return run;
};

describe("a run", () => {
  test("counts its times from the first event", () => {
    const run = told(story());
    expect(run.now).toBe(7);
    expect(run.requests[0].arrival).toBe(1);
  });

  test("orders instances by role and number", () => {
    expect(told(story()).ordered().map((one) => one.id)).toEqual(["p2", "p10", "d0"]);
  });

  test("has a group's blocks on every member, and marks the suspended ones", () => {
    const run = told(story());
    for (const id of ["p2", "p10"]) {
      const { blocks } = run.instances.get(id)!;
      expect(blocks.count).toBe(2);
      expect([...blocks.start.slice(0, 2)]).toEqual([2, 4]);
      expect([...blocks.end.slice(0, 2)]).toEqual([3, 4.5]);
      expect([...blocks.kind.slice(0, 2)]).toEqual([STOPPED, COMPUTES]);
    }
    expect(run.requests[0].spans.map((one) => one.by)).toEqual([["s"], []]);
  });

  test("draws a lifeline from arrival to end", () => {
    const run = told(story());
    const lane = run.lifelines[run.requests[0].lane];
    expect([...lane.kind.slice(0, lane.count)]).toEqual([WAITS, TURN, COMPUTES, TURN, COMPUTES, TURN, LANDS, DECODES]);
    expect([lane.start[0], lane.end[lane.count - 1]]).toEqual([1, 7]);
    expect(lane.open.size).toBe(0);
  });

  test("gives a lane to a later request when it is free", () => {
    const run = told(story());
    run.add({ t: 108, kind: "arrived", id: "s" });
    run.add({ t: 108, kind: "arrived", id: "u" });
    expect(run.requests.map((one) => one.lane)).toEqual([0, 0, 1]);
  });

  test("knows the share of KV in use, also after an instance is gone", () => {
    const run = told(story());
    expect(run.kvShare.get("decode")!.at(5)).toBe(0.5);
    run.add({ t: 108, kind: "gone", id: "d0" });
    expect(run.kvShare.get("decode")!.at(8)).toBe(0);
  });

  test("marks what is lost", () => {
    const run = told(story().slice(0, 10));
    run.add({ t: 103, kind: "stops", id: "r", why: "lost" });
    expect(run.instances.get("p2")!.blocks.kind[0]).toBe(LOST);
  });

  test("refuses another format", () => {
    expect(() => told([{ ...HEAD, millrace_board: 2 } as Line])).toThrow(FormatError);
  });
});

describe("the board", () => {
  test("counts what passes the filter at any moment", () => {
    const board = new Board();
    board.open(story());
    expect(countAt(board, 1.2)).toMatchObject({ waiting: 1, computing: 0, firstTokens: 0 });
    expect(countAt(board, 2.5)).toMatchObject({ waiting: 0, computing: 1 });
    expect(countAt(board, 6)).toMatchObject({ decoding: 1, firstTokens: 1, judged: 1, inTime: 0 });
    expect(countAt(board, 7)).toMatchObject({ decoding: 0, firstTokens: 1 });
    board.filter.sloClass = "document";
    expect(countAt(board, 6).firstTokens).toBe(0);
  });

  test("measures lateness while a request waits, too", () => {
    const { requests } = told(story());
    expect(lateness(requests[0], 2)).toBe(0.5);
    expect(lateness(requests[0], 7)).toBe(1.75);
  });

  test("plays a replay to its end and starts it again", () => {
    const board = new Board();
    board.open(story());
    board.play();
    expect(board.now(0)).toBe(0);
    board.speed = 4;
    board.advance(1000);
    expect(board.now(0)).toBe(4);
    board.advance(9000);
    expect([board.now(0), board.playing]).toEqual([7, false]);
  });

  test("a live run moves on between events", () => {
    const board = new Board();
    board.hear([{ ...HEAD, source: "live" }, { t: 50, kind: "fleet", policy: "edf" }], 1000);
    expect(board.mode).toBe("live");
    expect(board.now(3500)).toBe(2.5);
    board.hear([{ ...HEAD, source: "live" }], 4000);
    expect(board.run.policy).toBe("");
  });

  test("zooms around a time and stays there", () => {
    const board = new Board();
    board.open(story());
    const before = board.window(0);
    board.zoom(0.5, 2);
    const after = board.window(0);
    const share = (view: typeof before) => (2 - view.from) / (view.to - view.from);
    expect(share(after)).toBeCloseTo(share(before));
    expect(after.to - after.from).toBeCloseTo((before.to - before.from) / 2);
  });
});

describe("lanes", () => {
  test("visit what overlaps, an early long span and open spans, too", () => {
    const lane = new Lane();
    const long = lane.begin(0, 1, 0);
    lane.finish(lane.begin(1, 2, 0), 2);
    lane.finish(long, 50);
    const open = lane.begin(60, 3, 0);
    lane.finish(lane.begin(70, 4, 0), 71);
    const seen = (from: number, to: number) => {
      const found: number[] = [];
      lane.each(from, to, (index) => found.push(lane.owner[index]));
      return found;
    };
    expect(seen(10, 20)).toEqual([1]);
    expect(seen(2, 60)).toEqual([1]);
    expect(seen(500, 501)).toEqual([3]);
    expect(lane.at(70.5)).toBe(3);
    lane.finish(open, 65);
    expect(seen(500, 501)).toEqual([]);
  });

  test("grow beyond their first room", () => {
    const lane = new Lane();
    for (let index = 0; index < 1000; index++) lane.finish(lane.begin(index, index, 7), index + 1);
    expect([lane.count, lane.owner[999], lane.kind[64]]).toEqual([1000, 999, 7]);
  });

  test("a series gives the value that holds at a time", () => {
    const series = new Series();
    series.add(1, 10);
    series.add(2, 20);
    series.add(2, 30);
    expect([0.5, 1, 1.5, 2, 9].map((time) => series.at(time))).toEqual([0, 10, 10, 30, 30]);
  });
});

describe("pixels", () => {
  const paint = (until: number): number[] => {
    const lane = new Lane();
    lane.finish(lane.begin(0, 1, 0), 2);
    lane.finish(lane.begin(2, 2, 0), 2.001);
    lane.begin(6, 3, 0);
    const pixels = new Uint32Array(20);
    const drawn = paintLane(pixels, 10, 1, lane, { from: 0, to: 10, until }, (owner) => owner);
    return [...pixels.slice(10), drawn];
  };

  test("a span covers its time, at least one pixel, and an open span reaches the present", () => {
    expect(paint(8)).toEqual([1, 1, 2, 0, 0, 0, 3, 3, 0, 0, 3]);
  });

  test("what ended before the last frame is not painted again", () => {
    const lane = new Lane();
    lane.finish(lane.begin(0, 1, 0), 2);
    lane.finish(lane.begin(3, 2, 0), 6);
    const pixels = new Uint32Array(10);
    expect(paintLane(pixels, 10, 0, lane, { from: 0, to: 10, until: 8 }, (owner) => owner, 5)).toBe(1);
    expect([...pixels]).toEqual([0, 0, 0, 2, 2, 2, 0, 0, 0, 0]);
  });

  test("nothing is drawn after the moment of a replay", () => {
    expect(paint(1)).toEqual([1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
  });
});

test("lines that come in parts are put together, and a cut last line is left out", () => {
  const lines = new LineReader();
  expect([...lines.read('{"t":1,"kind":"go')]).toEqual([]);
  expect([...lines.read('ne","id":"p0"}\n{"t":2')]).toEqual([{ t: 1, kind: "gone", id: "p0" }]);
  expect([...lines.end()]).toEqual([]);
});

test("steps of an axis are round, and times are read at a glance", () => {
  expect([0.3, 2.1, 7, 60].map(tickStep)).toEqual([0.5, 5, 10, 100]);
  expect([clock(0.25, 0.05), clock(90, 10), clock(125, 1), clock(3600, 100)]).toEqual(["0.25 s", "90 s", "2:05", "60:00"]);
});

test("a name that does not fit keeps its end", () => {
  const fit = (room: number) => shortened("req-1234", room, (text) => text.length);
  expect([fit(8), fit(5), fit(1), fit(0)]).toEqual(["req-1234", "…1234", "", ""]);
});

test("percentiles are by nearest rank", () => {
  expect(percentile([], 0.95)).toBe(0);
  expect(percentile([4, 1, 3, 2], 0.5)).toBe(2);
  expect(percentile(Array.from({ length: 100 }, (_, index) => index + 1), 0.95)).toBe(95);
});
