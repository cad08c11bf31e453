// Heat map of the mean compute time by worker and time.

import { Chart, drawXAxis, heightOfRow } from "./chart.js";
import { clamp, seconds, short } from "./format.js";
import { ink, rgb } from "./ink.js";
import { linear } from "./scale.js";
import { paintRowNames } from "./strips.js";

const KEY_HEIGHT = 34; // pixels of the colour key above the map

export class HeatMap extends Chart {
  constructor(host, run) {
    super(host, "mean compute time by worker and time; arrow keys move from cell to cell");
    this.margin = { ...this.margin, top: KEY_HEIGHT };
    this.update(run);
  }

  update(run) {
    Object.assign(this, { cells: run.heat.mean_s, columns: run.heat.columns, end: run.heat.end_s });
    const known = this.cells.flat().filter((value) => value !== null);
    this.low = known.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = known.reduce((a, b) => Math.max(a, b), 0);
    this.show();
  }

  get rowHeight() { return heightOfRow(this.cells.length, 300); }
  get height() { return this.margin.top + this.rowHeight * this.cells.length + this.margin.bottom; }

  paint(pen) {
    const { area } = this;
    const stops = ["cool", "warm", "hot"].map(rgb);
    this.scale = linear(0, this.columns, area.left, area.right);
    this.cells.forEach((row, worker) => row.forEach((value, column) => {
      if (value !== null) this.paintCell(pen, area, worker, column, blend(stops, this.strength(value)));
    }));
    paintRowNames(pen, area, this.cells.length, this.rowHeight);
    drawXAxis(pen, area, linear(0, this.end, area.left, area.right), "seconds", (tick) => short(tick));
    this.paintKey(pen, area, stops);
    if (this.cursor !== null) this.paintCursor(pen, area);
  }

  strength(value) {
    return this.high > this.low ? (value - this.low) / (this.high - this.low) : 0;
  }

  paintCell(pen, area, worker, column, colour) {
    const [left, right] = [Math.floor(this.scale.at(column)), Math.floor(this.scale.at(column + 1))];
    pen.fillStyle = colour;
    pen.fillRect(left, area.top + worker * this.rowHeight, right - left, Math.max(1, this.rowHeight - 1));
  }

  paintKey(pen, area, stops) {
    const width = Math.min(160, (area.right - area.left) / 3);
    for (let x = 0; x < width; x += 1) {
      pen.fillStyle = blend(stops, x / width);
      pen.fillRect(area.left + x, 6, 1, 10);
    }
    Object.assign(pen, { fillStyle: ink("soft"), textAlign: "left", textBaseline: "middle" });
    pen.fillText(`${short(this.low, 3)} to ${seconds(this.high, 3)}`, area.left + width + 8, 12);
  }

  paintCursor(pen, area) {
    const { worker, column } = this.cursor;
    const left = this.scale.at(column);
    pen.lineWidth = 2;
    pen.strokeStyle = ink("focus");
    pen.strokeRect(left - 1, area.top + worker * this.rowHeight - 1, this.scale.at(column + 1) - left + 2, this.rowHeight + 1);
    pen.lineWidth = 1;
  }

  point(x, y) {
    const column = clamp(Math.floor(this.scale.value(x)), 0, this.columns - 1);
    this.cursor = { worker: clamp(Math.floor((y - this.area.top) / this.rowHeight), 0, this.cells.length - 1), column };
  }

  step({ key }) {
    const move = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[key];
    if (!move) return false;
    const { worker, column } = this.cursor ?? { worker: 0, column: 0 };
    const [down, right] = this.cursor ? move : [0, 0];
    this.cursor = { worker: clamp(worker + down, 0, this.cells.length - 1), column: clamp(column + right, 0, this.columns - 1) };
    return true;
  }

  place() {
    return [this.scale.at(this.cursor.column + 0.5), this.area.top + (this.cursor.worker + 0.5) * this.rowHeight];
  }

  lines() {
    const { worker, column } = this.cursor;
    const value = this.cells[worker][column];
    const [from, to] = [column, column + 1].map((edge) => (edge * this.end) / this.columns);
    return [`worker ${worker}, ${short(from)} to ${seconds(to)}`, value === null ? "no gradient arrived" : `${seconds(value)} per minibatch`];
  }
}

function blend(stops, share) {
  const place = clamp(share, 0, 1) * (stops.length - 1);
  const index = Math.min(Math.floor(place), stops.length - 2);
  const part = place - index;
  return `rgb(${stops[index].map((value, i) => Math.round(value + (stops[index + 1][i] - value) * part)).join(" ")})`;
}
