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

/**
 * Fills row `row` of `pixels`, `width` wide, with the lane's spans that reach beyond `since`. Returns how
 * many it drew.
 */
export function paintLane(
  pixels: Uint32Array,
  width: number,
  row: number,
  lane: Lane,
  view: Window,
  colour: (owner: number, kind: number) => Pixel,
  since = view.from,
): number {
  const scale = width / (view.to - view.from);
  const base = row * width;
  const to = Math.min(view.to, view.until);
  const { start, end, owner, kind } = lane;
  let drawn = 0;
  let last = -1; // the pixel of the last span that was narrower than a pixel
  const paint = (index: number): void => {
    drawn++;
    const left = Math.max(0, Math.floor((start[index] - view.from) * scale));
    const right = Math.min(width, Math.max(left + 1, Math.round((Math.min(end[index], to) - view.from) * scale)));
    if (right === left + 1) {
      if (left === last) return; // one span of a pixel is as good as another
      last = left;
      pixels[base + left] = colour(owner[index], kind[index]);
    } else pixels.fill(colour(owner[index], kind[index]), base + left, base + right);
  };
  const first = lane.first(since);
  for (const index of lane.open) if (index < first) paint(index);
  for (let index = first; index < lane.count && start[index] < to; index++) {
    if (end[index] > since) paint(index);
  }
  return drawn;
}
