// Spans of time on one row, in columns of numbers: a run has hundreds of thousands of them.

const FIRST_ROOM = 64;

/** Returns the first index in `values[0..count)`, which ascend, whose value is at least `wanted`. */
export function lowerBound(values: ArrayLike<number>, count: number, wanted: number): number {
  let low = 0;
  let high = count;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low;
}

export class Lane {
  count = 0;
  start = new Float64Array(FIRST_ROOM);
  end = new Float64Array(FIRST_ROOM);
  /** Whose span it is: a number that the owner of the lane chooses. */
  owner = new Int32Array(FIRST_ROOM);
  /** What kind of span, or a level from 0 to 255. */
  kind = new Uint8Array(FIRST_ROOM);
  /** Spans without an end so far. */
  readonly open = new Set<number>();
  private longest = 0;

  /** Begins a span; starts must not descend. Returns its index. */
  begin(start: number, owner: number, kind: number): number {
    if (this.count === this.start.length) this.grow();
    const index = this.count++;
    this.start[index] = start;
    this.end[index] = Infinity;
    this.owner[index] = owner;
    this.kind[index] = kind;
    this.open.add(index);
    return index;
  }

  finish(index: number, end: number): void {
    if (!this.open.delete(index)) return;
    this.end[index] = end;
    this.longest = Math.max(this.longest, end - this.start[index]);
  }

  finishAll(end: number): void {
    for (const index of [...this.open]) this.finish(index, end);
  }

  /** Returns the first span that may reach `from`, open spans left out. */
  first(from: number): number {
    return lowerBound(this.start, this.count, from - this.longest);
  }

  /** Calls `visit` with the spans that overlap [from, to), in order of their starts. */
  each(from: number, to: number, visit: (index: number) => void): void {
    const first = this.first(from);
    for (const index of this.open) if (index < first) visit(index);
    for (let index = first; index < this.count && this.start[index] < to; index++) {
      if (this.end[index] > from) visit(index);
    }
  }

  /** Returns the last span that covers the time, or -1. */
  at(time: number): number {
    let found = -1;
    this.each(time, time + 1e-9, (index) => (found = index));
    return found;
  }

  private grow(): void {
    const room = this.start.length * 2;
    const copy = <T extends Float64Array | Int32Array | Uint8Array>(from: T, to: T): T => {
      to.set(from as never);
      return to;
    };
    this.start = copy(this.start, new Float64Array(room));
    this.end = copy(this.end, new Float64Array(room));
    this.owner = copy(this.owner, new Int32Array(room));
    this.kind = copy(this.kind, new Uint8Array(room));
  }
}

/** Values over time, each from its time to the next one's. */
export class Series {
  readonly times: number[] = [];
  readonly values: number[] = [];

  add(time: number, value: number): void {
    const last = this.times.length - 1;
    if (last >= 0 && this.times[last] === time) this.values[last] = value;
    else {
      this.times.push(time);
      this.values.push(value);
    }
  }

  at(time: number): number {
    const after = lowerBound(this.times, this.times.length, time + 1e-9);
    return after ? this.values[after - 1] : 0;
  }
}
