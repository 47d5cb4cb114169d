// Colours, as the 32-bit pixels of a canvas (ABGR) and as CSS.

import { COMPUTES, DECODES, LANDS, LOST, STOPPED, TURN, WAITS } from "./run";

export type Pixel = number;

/** Okabe and Ito's palette and tints of it: told apart with colour blindness, on white and black. */
const HUES: [number, number, number][] = [
  [0, 114, 178],
  [230, 159, 0],
  [0, 158, 115],
  [204, 121, 167],
  [86, 180, 233],
  [213, 94, 0],
  [148, 103, 189],
  [170, 160, 20],
  [23, 190, 207],
  [140, 86, 75],
];

const pixel = ([red, green, blue]: readonly number[]): Pixel => ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;

const mixed = (one: readonly number[], other: readonly number[], share: number): number[] =>
  one.map((value, index) => Math.round(value * (1 - share) + other[index] * share));

export interface Theme {
  ground: Pixel;
  groundCss: string;
  ink: string;
  faint: string;
  hues: Pixel[];
  dimmed: Pixel;
  late: string;
  mark: Pixel;
  /** By kind of span. */
  kinds: Pixel[];
  levels: Pixel[];
  /** Of a lifeline after a first token that came late. */
  afterLate: Pixel;
}

function theme(ground: number[], ink: number[]): Theme {
  const shade = (rgb: number[], share: number) => pixel(mixed(rgb, ground, share));
  const kinds: Pixel[] = [];
  kinds[WAITS] = shade([213, 94, 0], 0.55);
  kinds[TURN] = shade([230, 159, 0], 0.5);
  kinds[COMPUTES] = kinds[STOPPED] = shade([0, 114, 178], 0);
  kinds[LOST] = shade(ink, 0.3);
  kinds[LANDS] = shade([148, 103, 189], 0.2);
  kinds[DECODES] = shade([0, 158, 115], 0.45);
  return {
    ground: pixel(ground),
    groundCss: `rgb(${ground})`,
    ink: `rgb(${ink})`,
    faint: `rgb(${mixed(ink, ground, 0.8)})`,
    hues: HUES.map(pixel),
    dimmed: pixel(mixed(ink, ground, 0.85)),
    late: "rgb(213, 40, 0)",
    mark: pixel(ink),
    kinds,
    afterLate: shade([204, 121, 167], 0.1),
    levels: Array.from({ length: 256 }, (_, level) => shade([86, 120, 160], 0.9 - (0.65 * level) / 255)),
  };
}

export const LIGHT = theme([255, 255, 255], [32, 36, 42]);
export const DARK = theme([20, 22, 26], [222, 226, 232]);

export const css = (value: Pixel): string => `rgb(${value & 255}, ${(value >> 8) & 255}, ${(value >> 16) & 255})`;

/** Returns a number of a hue for a name; equal names have equal hues. */
export function hueOf(name: string, hues: number): number {
  let sum = 2166136261;
  for (let index = 0; index < name.length; index++) sum = Math.imul(sum ^ name.charCodeAt(index), 16777619);
  return (sum >>> 0) % hues;
}
