// Base class of the charts: drawing at device resolution, a cursor by pointer and keys, and its description.

import { clamp } from "./format.js";
import { ink } from "./ink.js";

export const FONT = "12px system-ui, sans-serif";
const TALLEST = 4000; // pixels, largest height of all rows
const said = document.getElementById("said");
const drawn = [];

/** Draw all charts at once, as before a print, which waits for no frame. */
export function drawAll() {
  for (const chart of drawn) if (chart.canvas.isConnected) chart.draw();
}

/** Subclasses define `paint(pen)`, the cursor moves `point(x, y)` and `step(event)`, and its description `lines()`. */
export class Chart {
  constructor(host, label) {
    this.host = host;
    this.margin = { left: 58, right: 14, top: 8, bottom: 38 };
    this.cursor = null;
    this.isDrawn = false;
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.canvas.setAttribute("aria-roledescription", "chart");
    this.canvas.setAttribute("aria-label", label);
    this.tip = Object.assign(document.createElement("div"), { className: "tip", hidden: true });
    this.tip.setAttribute("aria-hidden", "true");
    host.replaceChildren(this.canvas, this.tip);
    this.listen();
  }

  get height() { return 220; }
  get width() { return this.canvas.clientWidth; }
  get area() {
    const { left, right, top, bottom } = this.margin;
    return { left, top, right: this.width - right, bottom: this.height - bottom };
  }

  paint() {}
  point() {}
  step() { return false; }
  lines() { return []; }
  place() { return [0, 0]; }

  listen() {
    const { canvas } = this;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("blur", () => this.leave());
    canvas.addEventListener("keydown", (event) => this.key(event));
    document.addEventListener("themechange", () => this.redraw());
    new ResizeObserver(() => this.redraw()).observe(this.host);
    drawn.push(this);
  }

  /** Draw before the first frame, if it has not come: the scales of the drawing place the cursor. */
  begin() {
    if (!this.isDrawn) this.draw();
  }

  hover(event) {
    this.begin();
    this.point(event.offsetX, event.offsetY);
    this.show();
  }

  leave() {
    this.cursor = null;
    this.show();
  }

  key(event) {
    this.begin();
    if (event.ctrlKey || event.metaKey || event.altKey || !this.step(event)) return;
    event.preventDefault();
    this.show();
    said.textContent = this.lines().join(". ");
  }

  /** Redraw, and show the description at the cursor. */
  show() {
    const lines = this.cursor === null ? [] : this.lines();
    this.tip.hidden = lines.length === 0;
    this.tip.textContent = lines.join("\n");
    if (lines.length) {
      const [x, y] = this.place();
      const beside = x + 14 + this.tip.offsetWidth < this.width ? x + 14 : x - 14 - this.tip.offsetWidth;
      this.tip.style.left = `${clamp(beside, 0, Math.max(0, this.width - this.tip.offsetWidth))}px`;
      this.tip.style.top = `${y + 16}px`;
    }
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = null;
      this.draw();
    });
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    if (!this.canvas.width) return;
    const pen = this.canvas.getContext("2d");
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.font = FONT;
    this.paint(pen, ratio);
    this.isDrawn = true;
  }
}

/** Draw ticks with numbers and a title below the area. */
export function drawXAxis(pen, area, scale, title, write) {
  pen.strokeStyle = ink("line");
  pen.fillStyle = ink("soft");
  pen.textAlign = "center";
  pen.textBaseline = "top";
  for (const tick of scale.ticks(Math.floor((area.right - area.left) / 64) || 1)) {
    const x = scale.at(tick);
    line(pen, x, area.bottom, x, area.bottom + 4);
    const half = pen.measureText(write(tick)).width / 2;
    pen.fillText(write(tick), Math.min(x, area.right + 12 - half), area.bottom + 6);
  }
  pen.fillText(title, (area.left + area.right) / 2, area.bottom + 22);
  line(pen, area.left, area.bottom, area.right, area.bottom);
}

/** Draw ticks with lines across the area and numbers on its left. */
export function drawYAxis(pen, area, scale, write) {
  pen.strokeStyle = ink("line", 0.6);
  pen.fillStyle = ink("soft");
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const tick of scale.ticks(Math.floor((area.bottom - area.top) / 34) || 1)) {
    line(pen, area.left, scale.at(tick), area.right, scale.at(tick));
    pen.fillText(write(tick), area.left - 7, scale.at(tick));
  }
}

/** Return the height of the row of a worker, smaller for many workers. */
export function heightOfRow(rows, room) {
  const height = clamp(room / rows, Math.min(9, TALLEST / rows), 30);
  return height > 2 ? Math.round(height) : height;
}

export function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

/** Hide the part of the page of a chart without content. */
export function leaveOut(host, isLeftOut = true) {
  const part = host.closest(".part");
  part.hidden = isLeftOut;
  const section = part.closest("section");
  section.hidden = [...section.querySelectorAll(".part")].every((each) => each.hidden);
}
