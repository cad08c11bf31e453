// Share of each rank in the samples of an update, over time.

import { Chart, drawXAxis, drawYAxis, line } from "./chart.js";
import { clamp, seconds, short } from "./format.js";
import { dash, ink, seriesInk } from "./ink.js";
import { linear } from "./scale.js";

const LINE_HEIGHT = 15; // pixels between two names at the right
const MOST_NAMES = 12;

export class Shares extends Chart {
  constructor(host, run) {
    super(host, "samples of each rank in an update, over time; arrow keys move the cursor");
    this.margin = { ...this.margin, right: 118 };
    this.update(run);
  }

  update(run) {
    Object.assign(this, { rows: run.shares.mean, columns: run.shares.columns, end: run.shares.end_s, equal: run.shares.equal });
    this.show();
  }

  get height() { return 230; }

  paint(pen) {
    const { area } = this;
    const values = [...this.rows.flat().filter((value) => value !== null), this.equal];
    const high = Math.max(...values);
    this.xScale = linear(0, this.end, area.left, area.right);
    this.yScale = linear(0, high * 1.08, area.bottom, area.top);
    drawYAxis(pen, area, this.yScale, (tick) => short(tick, 3));
    drawXAxis(pen, area, this.xScale, "seconds", (tick) => short(tick));
    this.paintEqual(pen, area);
    this.rows.forEach((row, rank) => this.paintRow(pen, row, rank));
    this.paintNames(pen, area);
    if (this.cursor !== null) {
      pen.strokeStyle = ink("focus");
      const x = this.xScale.at(this.timeOf(this.cursor));
      line(pen, x, area.top, x, area.bottom);
    }
  }

  paintEqual(pen, area) {
    pen.strokeStyle = ink("soft");
    pen.setLineDash([2, 4]);
    line(pen, area.left, this.yScale.at(this.equal), area.right, this.yScale.at(this.equal));
    pen.setLineDash([]);
  }

  timeOf(column) { return ((column + 0.5) * this.end) / this.columns; }

  paintRow(pen, row, rank) {
    pen.beginPath();
    let held = null; // a slice of time without an update has the shares before it
    row.forEach((value, column) => {
      held = value ?? held;
      if (held === null) return;
      const y = this.yScale.at(held);
      pen.lineTo(this.xScale.at((column * this.end) / this.columns), y);
      pen.lineTo(this.xScale.at(((column + 1) * this.end) / this.columns), y);
    });
    Object.assign(pen, { strokeStyle: seriesInk(rank), lineWidth: 2, lineJoin: "round" });
    pen.setLineDash(dash(rank));
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
  }

  /** Name the lines at their ends; ranks with the same share have one name. */
  paintNames(pen, area) {
    const named = grouped(this.rows.map((row) => row.findLast((value) => value !== null) ?? null)).slice(0, MOST_NAMES);
    Object.assign(pen, { textAlign: "left", textBaseline: "middle" });
    let free = area.top;
    for (const { value, ranks } of named.sort((a, b) => b.value - a.value)) {
      const y = Math.max(free, this.yScale.at(value));
      free = y + LINE_HEIGHT;
      pen.fillStyle = seriesInk(ranks[0]);
      pen.fillText(`${shortList(ranks)}: ${short(value, 3)}`, area.right + 8, y);
    }
  }

  point(x) {
    this.cursor = clamp(Math.floor((this.xScale.value(x) / this.end) * this.columns), 0, this.columns - 1);
  }

  step({ key, shiftKey }) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (!move) return false;
    this.cursor = this.cursor === null ? 0 : clamp(this.cursor + move * (shiftKey ? 10 : 1), 0, this.columns - 1);
    return true;
  }

  place() { return [this.xScale.at(this.timeOf(this.cursor)), this.area.top]; }

  lines() {
    const [from, to] = [this.cursor, this.cursor + 1].map((edge) => (edge * this.end) / this.columns);
    const shares = grouped(this.rows.map((row) => row[this.cursor])).slice(0, MOST_NAMES);
    return [`${short(from)} to ${seconds(to)}`, ...shares.map(({ value, ranks }) => `${shortList(ranks)}: ${short(value, 3)} samples`)];
  }
}

/** Return the values that are known, each with the ranks that have it. */
function grouped(values) {
  const found = new Map();
  values.forEach((value, rank) => {
    if (value === null) return;
    const key = short(value, 3);
    if (!found.has(key)) found.set(key, { value, ranks: [] });
    found.get(key).ranks.push(rank);
  });
  return [...found.values()];
}

function shortList(ranks) {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  return ranks.length > 3 ? `${ranks.length} ranks` : `ranks ${ranks.join(", ")}`;
}
