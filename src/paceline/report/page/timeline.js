// Timeline: one row per worker with its tasks and their fates, and the updates.

import { Chart, drawXAxis, heightOfRow, line } from "./chart.js";
import { clamp, lastAtMost, seconds, short } from "./format.js";
import { ink, isStripe, rgb } from "./ink.js";
import { linear } from "./scale.js";
import { coverage, within } from "./work.js";

const LEAST_UPDATE_GAP = 9; // pixels between update lines, on average
const TICK = 9; // pixels, length of the tick of an update above the workers
const LEAST_PIECE = 7; // mean pixels per task from which on borders between tasks are drawn
const ZOOM = 1.6;
const WHOLE = 0.999; // share of the run from which on a view counts as all of it
const NARROWEST = 1e-6; // share of the run in the deepest zoom

export class Timeline extends Chart {
  constructor(host, run, work, updates, fates) {
    super(host, `timeline of ${run.workers} workers; arrow keys go from task to task, plus and minus zoom, Shift and arrows pan`);
    this.fates = fates;
    this.drag = null;
    this.margin = { ...this.margin, top: TICK + 3 };
    this.update(run, work, updates);
    this.listenForView();
  }

  /** Show other tasks; the view stays where it is if it is part of them. */
  update(run, work, updates) {
    const isPart = this.run && this.view.to - this.view.from < this.whole * WHOLE;
    Object.assign(this, { run, work, fateOf: run.endings.map(([fate]) => this.fates.indexOf(fate)) });
    this.cursor &&= this.at(Math.min(this.cursor.worker, run.workers - 1), this.cursor.time);
    this.updates = Float64Array.from(updates.time, (quanta) => quanta * run.quantum_s);
    if (isPart) this.setView(this.view.from, this.view.to);
    else this.setView(run.begin_s, run.begin_s + this.whole);
    this.show();
  }

  get rowHeight() { return heightOfRow(this.run.workers, 360); }
  get height() { return this.margin.top + this.rowHeight * this.run.workers + this.margin.bottom; }

  listenForView() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.drag = event.offsetX;
    });
    for (const over of ["pointerup", "pointercancel"]) canvas.addEventListener(over, () => { this.drag = null; });
  }

  wheel(event) {
    if (document.activeElement !== this.canvas && !event.ctrlKey) return; // the page scrolls
    event.preventDefault();
    this.zoom(event.deltaY < 0 ? ZOOM : 1 / ZOOM, this.scale.value(event.offsetX));
  }

  /** Show a part of the run, for the buttons. */
  look(how) {
    const middle = (this.view.from + this.view.to) / 2;
    const span = this.view.to - this.view.from;
    if (how === "in") this.zoom(ZOOM, middle);
    else if (how === "out") this.zoom(1 / ZOOM, middle);
    else if (how === "left") this.moveView(-span / 4);
    else if (how === "right") this.moveView(span / 4);
    else this.setView(this.run.begin_s, this.run.begin_s + this.whole);
  }

  zoom(factor, around) {
    const { from, to } = this.view;
    this.setView(around - (around - from) / factor, around + (to - around) / factor);
  }

  moveView(by) {
    const { from, to } = this.view;
    const { begin_s: begin } = this.run;
    const allowed = clamp(by, begin - from, begin + this.whole - to);
    this.setView(from + allowed, to + allowed);
  }

  get whole() { return this.run.end_s - this.run.begin_s || 1; }

  setView(from, to) {
    const span = clamp(to - from, this.whole * NARROWEST, this.whole);
    const begin = clamp(from, this.run.begin_s, this.run.begin_s + this.whole - span);
    this.view = { from: begin, to: begin + span };
    this.redraw();
  }

  paint(pen, ratio) {
    const { area } = this;
    this.scale = linear(this.view.from, this.view.to, area.left, area.right);
    this.paintWork(pen, area, ratio);
    this.paintUpdates(pen, area);
    this.paintWorkers(pen, area);
    drawXAxis(pen, area, this.scale, "seconds", (tick) => short(tick, 7));
    this.paintCursor(pen);
    document.getElementById("view").textContent = `${short(this.view.from)} to ${seconds(this.view.to)} of ${seconds(this.run.end_s)}`;
  }

  paintWork(pen, area, ratio) {
    const width = Math.round((area.right - area.left) * ratio);
    const image = pen.createImageData(width, Math.round((area.bottom - area.top) * ratio));
    const palette = { fates: this.fates.map(rgb), stripe: rgb("paper"), idle: rgb("idle"), absent: rgb("paper"), names: this.fates };
    const gap = this.rowHeight > 4 ? 1.5 : 0;
    for (let worker = 0; worker < this.run.workers; worker += 1) {
      const top = Math.round(worker * this.rowHeight * ratio);
      const bottom = Math.round(((worker + 1) * this.rowHeight - gap) * ratio);
      const shares = coverage(this.work, worker, this.view, width, this.fateOf, this.fates.length);
      paintRow(image, top, bottom, shares, this.presence(worker, width), palette, ratio);
    }
    pen.putImageData(image, Math.round(area.left * ratio), Math.round(area.top * ratio));
    this.paintBorders(pen, area);
  }

  /** Return whether the worker was live, for each pixel. */
  presence(worker, width) {
    const there = new Uint8Array(width);
    const scale = width / (this.view.to - this.view.from);
    for (const [begin, end] of this.run.live[worker]) {
      there.fill(1, clamp(Math.floor((begin - this.view.from) * scale), 0, width), clamp(Math.ceil((end - this.view.from) * scale), 0, width));
    }
    return there;
  }

  paintBorders(pen, area) {
    pen.fillStyle = ink("paper");
    for (let worker = 0; worker < this.run.workers; worker += 1) {
      const [begin, end] = within(this.work, worker, this.view.from, this.view.to);
      if ((area.right - area.left) / (end - begin) < LEAST_PIECE) continue;
      for (let i = begin; i < end; i += 1) {
        const x = this.scale.at(this.work.begin[i]);
        if (x > area.left) pen.fillRect(x - 0.5, area.top + worker * this.rowHeight, 1, this.rowHeight);
      }
    }
  }

  /** Draw a tick per update above the workers, and a line where updates are far enough apart. */
  paintUpdates(pen, area) {
    const [begin, end] = [lastAtMost(this.updates, this.view.from) + 1, lastAtMost(this.updates, this.view.to) + 1];
    const hasRoom = (area.right - area.left) / Math.max(1, end - begin) >= LEAST_UPDATE_GAP;
    const bottom = hasRoom ? area.bottom : area.top - 2;
    let drawn = -1;
    pen.strokeStyle = ink("ink", hasRoom ? 0.45 : 0.75);
    for (let i = begin; i < end; i += 1) {
      const x = this.scale.at(this.updates[i]);
      if (x - drawn < 0.5) continue; // ticks closer than half a pixel
      drawn = x;
      line(pen, x, area.top - TICK, x, bottom);
    }
  }

  paintWorkers(pen, area) {
    const every = Math.ceil(14 / this.rowHeight);
    Object.assign(pen, { fillStyle: ink("soft"), textAlign: "right", textBaseline: "middle" });
    for (let worker = 0; worker < this.run.workers; worker += every) {
      pen.fillText(worker === 0 ? "worker 0" : worker, area.left - 6, this.middle(worker));
    }
  }

  middle(worker) {
    return this.margin.top + (worker + 0.5) * this.rowHeight - 0.75;
  }

  paintCursor(pen) {
    if (this.cursor === null) return;
    const { worker, time, piece } = this.cursor;
    const top = this.margin.top + worker * this.rowHeight;
    const at = (value) => clamp(this.scale.at(value), this.area.left, this.area.right);
    const [from, to] = piece === null ? [time, time] : [this.work.begin[piece], this.work.end[piece]];
    pen.strokeStyle = ink("ink");
    pen.lineWidth = 2;
    pen.strokeRect(at(from) - 1, top - 1, at(to) - at(from) + 2, this.rowHeight + 1);
    pen.lineWidth = 1;
  }

  point(x, y) {
    if (this.drag !== null) {
      this.moveView(this.scale.value(this.drag) - this.scale.value(x));
      this.drag = x;
    }
    const { area } = this;
    if (x < area.left || x > area.right || y > area.bottom) {
      this.cursor = null;
      return;
    }
    const worker = clamp(Math.floor((y - area.top) / this.rowHeight), 0, this.run.workers - 1);
    this.cursor = this.at(worker, this.scale.value(x));
  }

  at(worker, time) {
    const [begin, end] = [this.work.first[worker], this.work.first[worker + 1]];
    const latest = lastAtMost(this.work.begin, time, begin, end);
    return { worker, time, piece: latest >= begin && time <= this.work.end[latest] ? latest : null };
  }

  step({ key, shiftKey }) {
    const span = this.view.to - this.view.from;
    const around = this.cursor?.time ?? (this.view.from + this.view.to) / 2;
    if (key === "+" || key === "=") this.zoom(ZOOM, around);
    else if (key === "-") this.zoom(1 / ZOOM, around);
    else if (key === "Home") this.look("all");
    else if (shiftKey && key === "ArrowLeft") this.moveView(-span / 8);
    else if (shiftKey && key === "ArrowRight") this.moveView(span / 8);
    else return this.walk(key);
    return true;
  }

  /** Move the cursor to the next task, or to another worker. */
  walk(key) {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[key];
    if (!move) return false;
    const { worker, time } = this.cursor ?? { worker: 0, time: this.view.from };
    const row = clamp(worker + move[0], 0, this.run.workers - 1);
    this.cursor = this.at(row, this.cursor && move[1] ? this.neighbour(row, time, move[1]) : time);
    const span = this.view.to - this.view.from;
    if (this.cursor.time < this.view.from || this.cursor.time > this.view.to) this.setView(this.cursor.time - span / 2, this.cursor.time + span / 2);
    return true;
  }

  neighbour(worker, time, direction) {
    const [begin, end] = [this.work.first[worker], this.work.first[worker + 1]];
    if (begin === end) return time;
    const latest = lastAtMost(this.work.begin, time, begin, end);
    const next = clamp(latest + direction, begin, end - 1);
    return (this.work.begin[next] + this.work.end[next]) / 2;
  }

  place() {
    return [clamp(this.scale.at(this.cursor.time), this.area.left, this.area.right), this.middle(this.cursor.worker)];
  }

  lines() {
    if (this.cursor === null) return [`showing ${short(this.view.from)} to ${seconds(this.view.to)}`];
    const { worker, time, piece } = this.cursor;
    if (piece === null) {
      const there = this.run.live[worker].some(([begin, end]) => time >= begin && time <= end);
      return [`worker ${worker}: ${there ? "idle" : "not live, or unknown"}`, `at ${seconds(time)}`];
    }
    const { begin, end, draw, version, staleness, ending } = this.work;
    const [fate, reason] = this.run.endings[ending[piece]];
    const stale = staleness[piece] < 0 ? "" : `, staleness ${staleness[piece]}`;
    return [
      `worker ${worker}, draw ${draw[piece]}: ${fate}${reason ? `, ${reason}` : ""}`,
      `${seconds(end[piece] - begin[piece])}, from ${short(begin[piece], 6)} to ${seconds(end[piece], 6)}`,
      `computed on version ${version[piece]}${stale}`,
    ];
  }
}

/** Fill a row of pixels with the stacked shares of the fates. */
function paintRow(image, top, bottom, shares, there, palette, ratio) {
  for (let x = 0; x < image.width; x += 1) {
    let y = bottom;
    let filled = 0;
    for (let fate = 0; fate < shares.length; fate += 1) {
      filled += shares[fate][x];
      const until = Math.round(bottom - Math.min(1, filled) * (bottom - top));
      for (; y > until; y -= 1) {
        const stripe = isStripe(palette.names[fate], Math.floor(x / ratio), Math.floor(y / ratio));
        setPixel(image, x, y - 1, stripe ? palette.stripe : palette.fates[fate]);
      }
    }
    for (; y > top; y -= 1) setPixel(image, x, y - 1, there[x] ? palette.idle : palette.absent);
  }
}

function setPixel(image, x, y, [red, green, blue]) {
  const at = 4 * (y * image.width + x);
  image.data[at] = red;
  image.data[at + 1] = green;
  image.data[at + 2] = blue;
  image.data[at + 3] = 255;
}
