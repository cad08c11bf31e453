// Charts of loss, metrics and quorum with a common axis and cursor.

import { Chart, drawXAxis, drawYAxis, leaveOut, line } from "./chart.js";
import { clamp, lastAtMost, seconds, short } from "./format.js";
import { dash, ink, lineSample, seriesInk } from "./ink.js";
import { linear, logarithmic } from "./scale.js";

const KEY_STEPS = 240; // steps of the arrow keys on the whole axis
const FAR_ABOVE = 10; // ratio to the lowest line from which on a line, as of a run that diverges, does not stretch the axis

/** Panels of all curves; `updates[i]` are the unpacked updates of run i once they are loaded. */
export class Curves {
  constructor(data, updates) {
    Object.assign(this, { groups: data.groups, runs: data.runs, titles: data.axes, updates, axis: "time", logLoss: false, x: null });
    this.panels = [];
    this.addPanels(data.panels);
    this.legend();
    for (const radio of document.querySelectorAll("#axis input")) radio.addEventListener("change", () => this.turn(radio.value));
    document.getElementById("log-loss").addEventListener("change", (event) => {
      this.logLoss = event.target.checked;
      this.redraw();
    });
  }

  addPanels(titles) {
    for (const [name, title] of Object.entries(titles)) {
      const host = document.getElementById(name);
      const isThere = this.groups.some((group) => group.lines.time[name]);
      leaveOut(host, !isThere);
      if (isThere && !this.panels.some((panel) => panel.name === name)) this.panels.push(new Panel(host, this, name, title));
    }
  }

  /** Show other lines, in new panels as well. */
  update(data) {
    Object.assign(this, { groups: data.groups, runs: data.runs });
    this.addPanels(data.panels);
    for (const panel of this.panels) panel.show();
  }

  legend() {
    const entries = this.groups.map((group, index) => {
      const entry = document.createElement("span");
      entry.innerHTML = lineSample(index);
      entry.append(group.runs.length > 1 ? `${group.label} (${group.runs.length} runs)` : group.label);
      return entry;
    });
    document.getElementById("protocols").replaceChildren(...entries);
  }

  turn(axis) {
    this.axis = axis;
    this.x = null;
    this.redraw();
  }

  move(x) {
    this.x = x;
    this.redraw();
  }

  redraw() {
    for (const panel of this.panels) panel.redraw();
  }

  get end() {
    const lines = this.groups.flatMap((group) => Object.values(group.lines[this.axis]));
    return Math.max(...lines.map((one) => one.x[one.x.length - 1])) || 1;
  }

  /** Return the position of an update on the axis. */
  xOf(run, update) {
    if (this.axis === "updates") return this.runs[run].first_update + update + 1;
    const { time, workload } = this.updates[run];
    return this.axis === "time" ? time[update] * this.runs[run].quantum_s : workload[update];
  }

  /** Return the update at x, or null. */
  updateAt(run, x) {
    const columns = this.updates[run];
    if (!columns || !columns.k.length) return null;
    const { quantum_s: quantum, first_update: first } = this.runs[run];
    const exact = { time: x / quantum, updates: x - first, workload: x }[this.axis];
    const before = this.axis === "updates" ? Math.ceil(x - 1e-9) - 2 : lastAtMost(columns[this.axis], exact - 0.5);
    if (first && before < 0) return null; // before the updates that are known
    return before + 1 < columns.k.length ? Math.max(0, before + 1) : null;
  }
}

class Panel extends Chart {
  constructor(host, curves, name, title) {
    super(host, `${title}; arrow keys move the cursor, with Shift by more`);
    Object.assign(this, { curves, name });
  }

  get hasNotes() { return this.name === "k" && this.curves.runs.some((run) => run.switches.length); }
  get area() { return { ...super.area, top: this.hasNotes ? 28 : this.margin.top }; }

  get height() { return { loss: 280, k: 220 }[this.name] ?? 190; }

  get drawn() {
    return this.curves.groups.map((group, index) => ({ group, index, one: group.lines[this.curves.axis][this.name] })).filter(({ one }) => one);
  }

  /** The lines that determine the axis: all, except those far above the lowest one. */
  get within() {
    const all = this.drawn.map((each) => ({ ...each, top: highest(each.one.high) }));
    const lowest = Math.min(...all.map(({ top }) => top).filter((top) => top > 0));
    const within = this.curves.logLoss ? all : all.filter(({ top }) => !(top > FAR_ABOVE * lowest));
    this.cut = all.filter((each) => !within.includes(each));
    return within;
  }

  paint(pen) {
    const { area } = this;
    this.xScale = linear(0, this.curves.end, area.left, area.right);
    this.yScale = this.scaleY(area);
    drawYAxis(pen, area, this.yScale, (tick) => short(tick, 3));
    drawXAxis(pen, area, this.xScale, this.curves.titles[this.curves.axis], (tick) => short(tick));
    this.paintMarks(pen, area);
    pen.save();
    pen.rect(area.left, area.top - 3, area.right - area.left, area.bottom - area.top + 6);
    pen.clip();
    for (const { one, index } of this.drawn) this.paintBand(pen, one, index);
    for (const { one, index } of this.drawn) this.paintLine(pen, one, index);
    pen.restore();
    this.paintCut(pen, area);
    this.paintCursor(pen, area);
  }

  /** Name the lines that leave the chart at its top. */
  paintCut(pen, area) {
    if (!this.cut.length) return;
    const texts = this.cut.map(({ group, top }) => `${group.label} goes up to ${short(top, 2)}`);
    pen.fillStyle = ink("soft");
    pen.textAlign = "right";
    pen.textBaseline = "top";
    pen.fillText(texts.join(", "), area.right, area.top + 2);
  }

  scaleY({ top, bottom }) {
    const logs = this.name === "loss" && this.curves.logLoss;
    const values = this.within.flatMap(({ one }) => [...one.low, ...one.high]).filter((value) => value !== null && (!logs || value > 0));
    const low = values.reduce((a, b) => Math.min(a, b), Infinity);
    const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
    if (logs && low < high) return logarithmic(low, high, bottom, top);
    if (low === 0 && high === 0) return linear(0, 1, bottom, top);
    const room = (high - low || Math.abs(high)) * 0.08;
    if (this.name !== "k") return linear(low < 0 ? low - room : Math.max(0, low - room), high + room, bottom, top);
    return linear(Math.min(0, low), high > 0 ? high * 1.05 : high + 1, bottom, top);
  }

  paintBand(pen, one, index) {
    if (one.low === one.mean) return;
    pen.beginPath();
    one.x.forEach((x, i) => pen.lineTo(this.xScale.at(x), this.yAt(one.high[i])));
    for (let i = one.x.length - 1; i >= 0; i -= 1) pen.lineTo(this.xScale.at(one.x[i]), this.yAt(one.low[i]));
    pen.fillStyle = seriesInk(index, 0.22);
    pen.fill();
  }

  yAt(value) {
    return clamp(this.yScale.at(value), -1e5, 1e5);
  }

  paintLine(pen, one, index) {
    pen.beginPath();
    one.x.forEach((x, i) => {
      if (one.steps && i > 0) pen.lineTo(this.xScale.at(one.x[i - 1]), this.yAt(one.mean[i]));
      else if (one.steps) pen.moveTo(this.xScale.at(0), this.yAt(one.mean[0]));
      pen.lineTo(this.xScale.at(x), this.yAt(one.mean[i]));
    });
    Object.assign(pen, { strokeStyle: seriesInk(index), lineWidth: 2, lineJoin: "round" });
    pen.setLineDash(dash(index));
    pen.stroke();
    pen.setLineDash([]);
    pen.lineWidth = 1;
  }

  /** Draw protocol switches and resumptions, with their reasons where there is room; the decisions below have all. */
  paintMarks(pen, area) {
    const marks = this.drawn.flatMap(({ group, index }) =>
      this.curves.runs[group.runs[0]].switches.map((mark) => ({ mark, index, x: this.xScale.at(mark[this.curves.axis]) })));
    let free = -Infinity;
    for (const { mark, index, x } of marks.sort((a, b) => a.x - b.x)) {
      pen.strokeStyle = seriesInk(index, 0.8);
      pen.setLineDash([3, 3]);
      line(pen, x, this.hasNotes ? area.top - 22 : area.top, x, area.bottom);
      pen.setLineDash([]);
      if (this.hasNotes) free = writeBeside(pen, area, x, area.top - 16, mark.reason, free);
    }
  }

  paintCursor(pen, area) {
    const { x } = this.curves;
    if (x === null) return;
    const at = this.xScale.at(x);
    pen.strokeStyle = ink("ink", 0.7);
    line(pen, at, area.top, at, area.bottom);
    for (const { one, index } of this.drawn) {
      const value = valueAt(one, "mean", x);
      if (value === null) continue;
      pen.fillStyle = seriesInk(index);
      pen.beginPath();
      pen.arc(at, this.yAt(value), 4, 0, 7);
      pen.fill();
    }
  }

  point(x) {
    const { area } = this;
    this.cursor = clamp(this.xScale.value(clamp(x, area.left, area.right)), 0, this.curves.end);
    this.curves.move(this.cursor);
  }

  leave() {
    this.curves.move(null);
    super.leave();
  }

  step({ key, shiftKey }) {
    const { end, x } = this.curves;
    const to = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[key];
    if (to === undefined) return false;
    this.cursor = clamp(this.next(x ?? 0, to, shiftKey ? 10 : 1), 0, end);
    this.curves.move(this.cursor);
    return true;
  }

  /** Move by one update for a single run with few updates, else by a small step. */
  next(x, direction, factor) {
    const { curves } = this;
    const single = curves.runs.length === 1 && curves.updates[0];
    if (!Number.isFinite(direction) || !single || single.k.length > 10 * KEY_STEPS) {
      return x + (direction * factor * curves.end) / KEY_STEPS;
    }
    const here = curves.updateAt(0, x) ?? single.k.length - 1;
    const behind = x > 0 || curves.xOf(0, here) <= x ? here : -1;
    return curves.xOf(0, clamp(behind + direction * factor, 0, single.k.length - 1));
  }

  place() {
    return [this.xScale.at(this.cursor), this.area.top];
  }

  lines() {
    const { axis } = this.curves;
    const head = axis === "time" ? `at ${seconds(this.cursor)}` : `${axis} ${short(this.cursor)}`;
    return [head, ...this.drawn.flatMap((one) => (this.name === "k" ? this.decision(one) : this.value(one)))];
  }

  value({ group, one }) {
    const [mean, low, high] = ["mean", "low", "high"].map((which) => valueAt(one, which, this.cursor));
    if (mean === null) return [];
    const spread = one.low !== one.mean ? ` (${short(low)} to ${short(high)})` : "";
    return [`${group.label}: ${short(mean)}${spread}`];
  }

  /** Describe the update at the cursor: number of gradients and reason. */
  decision({ group, one }) {
    const run = group.runs[0];
    const update = this.curves.updateAt(run, this.cursor);
    if (update === null) return this.value({ group, one });
    const { reasons, label, switches, first_protocol: first, first_update: before } = this.curves.runs[run];
    const { k, reason, quorum_reason: quorum } = this.curves.updates[run];
    const inForce = switches.filter((mark) => mark.updates <= before + update).at(-1)?.reason ?? first;
    const name = this.curves.runs.length > 1 ? `${label}, ` : "";
    const why = reasons[reason[update]];
    const lines = [`${name}update ${before + update + 1}: k = ${k[update]}, ${why}`];
    const decided = reasons[quorum[update]] ?? "";
    if (!why.includes(decided.replace(/^k=\d+: /, ""))) lines.push(`decided: ${decided}`);
    return switches.length && inForce ? [...lines, `in force: ${inForce}`] : lines;
  }
}

/** Return the value of a line at x, null outside of it. */
function valueAt(one, which, x) {
  const last = one.x.length - 1;
  if (x > one.x[last] * (1 + 1e-9) || (!one.steps && x < one.x[0])) return null;
  const after = Math.min(lastAtMost(one.x, x * (1 - 1e-12)) + 1, last);
  if (one.steps || after === 0) return one[which][after];
  const share = (x - one.x[after - 1]) / (one.x[after] - one.x[after - 1]);
  return one[which][after - 1] + share * (one[which][after] - one[which][after - 1]);
}

/** Write beside a line if nothing else stands there up to `free`; return up to where something stands now. */
function writeBeside(pen, area, x, y, text, free) {
  const shown = text.length > 34 ? `${text.slice(0, 33)}…` : text;
  const width = pen.measureText(shown).width;
  const left = x + 6 + width < area.right ? x + 6 : x - 6 - width;
  if (left < free) return free;
  pen.fillStyle = ink("paper", 0.85);
  pen.fillRect(left - 2, y - 8, width + 4, 16);
  pen.fillStyle = ink("ink");
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(shown, left, y);
  return left + width + 8;
}

/** Return the largest finite value, 0 without one. */
function highest(values) {
  return values.reduce((most, value) => (value !== null && value > most ? value : most), 0);
}
