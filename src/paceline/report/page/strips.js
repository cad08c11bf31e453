// The distribution of each worker's round-trip times, a row a worker.

import { Chart, drawXAxis, heightOfRow, line } from "./chart.js";
import { clamp, seconds, short } from "./format.js";
import { ink } from "./ink.js";
import { linear, logarithmic } from "./scale.js";

const WIDE = 30; // times the median: a longest time beyond it is drawn on a logarithmic axis

export class Strips extends Chart {
  constructor(host, run) {
    super(host, "round-trip time of each worker; up and down arrows move from worker to worker");
    this.rows = run.round_trips;
    const known = this.rows.filter((row) => row);
    this.low = Math.min(...known.map((row) => row[0]));
    this.high = Math.max(...known.map((row) => row[5]));
    this.isWide = this.low > 0 && this.high > WIDE * Math.min(...known.map((row) => row[2]));
  }

  get rowHeight() { return heightOfRow(this.rows.length, 320); }
  get height() { return this.margin.top + this.rowHeight * this.rows.length + this.margin.bottom; }

  paint(pen) {
    const { area } = this;
    const [scale, title] = this.isWide ? [logarithmic(this.low, this.high, area.left + 6, area.right - 6), "seconds (logarithmic)"] : [linear(0, this.high, area.left, area.right - 6), "seconds"];
    this.scale = scale;
    drawXAxis(pen, area, scale, title, (tick) => short(tick, 3));
    paintRowNames(pen, area, this.rows.length, this.rowHeight);
    this.rows.forEach((row, worker) => row && this.paintStrip(pen, row, area.top + (worker + 0.5) * this.rowHeight));
    if (this.cursor !== null) frameRow(pen, area, this.cursor, this.rowHeight);
  }

  paintStrip(pen, [least, lower, median, upper, most, longest], y) {
    const at = this.scale.at;
    const half = Math.max(2, this.rowHeight * 0.3);
    Object.assign(pen, { strokeStyle: ink("used"), fillStyle: ink("used", 0.45) });
    line(pen, at(least), y, at(most), y);
    pen.fillRect(at(lower), y - half, Math.max(1, at(upper) - at(lower)), 2 * half);
    pen.strokeStyle = ink("ink");
    pen.lineWidth = 2;
    line(pen, at(median), y - half, at(median), y + half);
    pen.lineWidth = 1;
    pen.beginPath();
    pen.arc(at(longest), y, Math.min(3, half), 0, 7);
    pen.stroke();
  }

  point(x, y) {
    this.cursor = clamp(Math.floor((y - this.area.top) / this.rowHeight), 0, this.rows.length - 1);
  }

  step({ key }) {
    const move = { ArrowUp: -1, ArrowDown: 1 }[key];
    if (!move) return false;
    this.cursor = clamp((this.cursor ?? -move) + move, 0, this.rows.length - 1);
    return true;
  }

  place() {
    return [this.area.left + 40, this.area.top + (this.cursor + 0.5) * this.rowHeight];
  }

  lines() {
    const row = this.rows[this.cursor];
    if (!row) return [`worker ${this.cursor}: nothing arrived`];
    return [
      `worker ${this.cursor}: median ${seconds(row[2])}`,
      `half between ${short(row[1])} and ${seconds(row[3])}`,
      `5 to 95 %: ${short(row[0])} to ${seconds(row[4])}; longest ${seconds(row[5])}`,
    ];
  }
}

/** Write the workers' numbers left of their rows. */
export function paintRowNames(pen, area, rows, rowHeight) {
  const every = Math.ceil(14 / rowHeight);
  Object.assign(pen, { fillStyle: ink("soft"), textAlign: "right", textBaseline: "middle" });
  for (let row = 0; row < rows; row += every) {
    pen.fillText(row === 0 ? "worker 0" : row, area.left - 6, area.top + (row + 0.5) * rowHeight);
  }
}

export function frameRow(pen, area, row, rowHeight) {
  pen.strokeStyle = ink("ink", 0.7);
  pen.strokeRect(area.left - 1, area.top + row * rowHeight, area.right - area.left + 2, rowHeight);
}
