// How long frames take, while the picture moves.

const KEPT = 600;

export class Frames {
  private readonly gaps: number[] = [];
  private readonly drawing: number[] = [];
  private last = 0;
  private began = 0;
  private moved = false;

  /** Begins a frame; returns the milliseconds since the one before. */
  begin(now: number): number {
    const gap = this.last ? now - this.last : 0;
    this.last = now;
    this.began = performance.now();
    if (this.moved && gap) keep(this.gaps, gap);
    return gap;
  }

  /** Ends a frame; `moves`: the next one follows as soon as it can. */
  end(moves: boolean): void {
    if (moves) keep(this.drawing, performance.now() - this.began);
    this.moved = moves;
  }

  /** Returns the 95th percentile of the time from frame to frame, ms. */
  p95 = (): number => percentile(this.gaps, 0.95);

  /** Returns the 95th percentile of the time that drawing took, ms. */
  drawingP95 = (): number => percentile(this.drawing, 0.95);
}

function keep(values: number[], value: number): void {
  values.push(value);
  if (values.length > KEPT) values.shift();
}

/** Returns the nearest-rank percentile; 0 of none. */
export function percentile(values: number[], share: number): number {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.ceil(share * sorted.length) - 1] : 0;
}
