// Distribution of the round-trip times, one row per worker.

import { Chart, drawXAxis, heightOfRow, line } from "./chart.js";
import { clamp, seconds, short } from "./format.js";
import { ink } from "./ink.js";
import { linear, logarithmic } from "./scale.js";

const WIDE = 30; // ratio of longest time to median above which the axis is logarithmic

export class Strips extends Chart {
  constructor(host, run) {
    super(host, "round-trip time of each worker; up and down arrows move from worker to worker");
    this.update(run);
  }

  update(run) {
    this.rows = run.round_trips;
    const quantiles = this.rows.filter((row) => row).map((row) => row.quantiles_s);
    this.low = Math.min(...quantiles.map((row) => row[0]));
    this.high = Math.max(...quantiles.map((row) => row[5]));
    this.isWide = this.low > 0 && this.high > WIDE * Math.min(...quantiles.map((row) => row[2]));
    this.show();
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

  /** Draw known quantiles solid, and a dashed line to the longest time if the median is unknown. */
  paintStrip(pen, { quantiles_s: [least, lower, median, upper, most, longest], known }, y) {
    const at = this.scale.at;
    const half = Math.max(2, this.rowHeight * 0.3);
    if (known < 3) {
      this.paintAtLeast(pen, longest, y, half);
      return;
    }
    Object.assign(pen, { strokeStyle: ink("used"), fillStyle: ink("used", 0.45) });
    line(pen, at(least), y, at(most), y);
    const box = [at(lower), y - half, Math.max(1, at(upper) - at(lower)), 2 * half];
    if (known > 3) pen.fillRect(...box);
    else pen.strokeRect(...box);
    pen.strokeStyle = ink("ink");
    pen.lineWidth = 2;
    line(pen, at(median), y - half, at(median), y + half);
    pen.lineWidth = 1;
    if (known < 6) paintArrow(pen, at(longest), y, Math.min(6, half));
    else paintRing(pen, at(longest), y, Math.min(3, half));
  }

  paintAtLeast(pen, longest, y, half) {
    const x = this.scale.at(longest);
    Object.assign(pen, { strokeStyle: ink("dropped"), lineWidth: 2 });
    pen.setLineDash([5, 4]);
    line(pen, this.area.left, y, x, y);
    pen.setLineDash([]);
    paintArrow(pen, x, y, Math.min(6, half));
    if (this.rowHeight < 14) return;
    Object.assign(pen, { fillStyle: ink("ink"), textAlign: "left", textBaseline: "bottom" });
    pen.fillText(`at least ${seconds(longest, 3)}`, this.area.left + 6, y - 1);
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
    if (!row) return [`worker ${this.cursor}: no work`];
    const { quantiles_s: s, known, finished } = row;
    const time = (i) => (i < known ? seconds(s[i]) : `at least ${seconds(s[i])}`);
    const lines = [`worker ${this.cursor}: median ${time(2)}`];
    if (known > 1) lines.push(`half between ${short(s[1])} and ${time(3)}`, `5 to 95 %: ${short(s[0])} to ${time(4)}`);
    lines.push(`longest ${time(5)}`);
    return finished ? lines : [...lines, "no task finished"];
  }
}

function paintRing(pen, x, y, radius) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 7);
  pen.stroke();
}

function paintArrow(pen, x, y, size) {
  Object.assign(pen, { strokeStyle: ink("dropped"), lineWidth: 2 });
  line(pen, x, y - size, x + size, y);
  line(pen, x + size, y, x, y + size);
  pen.lineWidth = 1;
}

/** Draw the numbers of the workers on the left of their rows. */
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
