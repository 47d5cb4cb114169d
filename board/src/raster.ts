// Paints lanes into pixels, one pixel row per lane: a canvas stretches the rows afterwards. A run of
// 200 instances and 100,000 spans takes a few milliseconds, which rectangles on a canvas would not.

import type { Pixel } from "./colors";
import type { Lane } from "./lane";

export interface Window {
  from: number;
  to: number;
  /** Nothing is drawn after this time: the moment that a replay has reached. */
  until: number;
}

/** Fills row `row` of `pixels`, `width` wide, with the lane's spans. Returns how many it drew. */
export function paintLane(
  pixels: Uint32Array,
  width: number,
  row: number,
  lane: Lane,
  view: Window,
  colour: (owner: number, kind: number) => Pixel,
): number {
  const scale = width / (view.to - view.from);
  const base = row * width;
  const to = Math.min(view.to, view.until);
  let drawn = 0;
  lane.each(view.from, to, (index) => {
    const left = Math.max(0, Math.floor((lane.start[index] - view.from) * scale));
    const end = Math.min(lane.end[index], to);
    const right = Math.min(width, Math.max(left + 1, Math.round((end - view.from) * scale)));
    pixels.fill(colour(lane.owner[index], lane.kind[index]), base + left, base + right);
    drawn++;
  });
  return drawn;
}
