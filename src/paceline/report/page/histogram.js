// Histogram of the staleness of the used gradients.

import { Chart, drawXAxis, drawYAxis } from "./chart.js";
import { clamp, short } from "./format.js";
import { ink } from "./ink.js";
import { linear, niceStep } from "./scale.js";

const MOST_BARS = 60;

export class Histogram extends Chart {
  constructor(host, run) {
    super(host, "staleness of the used gradients; left and right arrows move from bar to bar");
    this.update(run);
  }

  update(run) {
    const { staleness, gradients } = run.staleness;
    this.total = gradients.reduce((a, b) => a + b, 0);
    const most = staleness.at(-1);
    this.step1 = most < MOST_BARS ? 1 : niceStep(most + 1, MOST_BARS);
    this.bars = new Array(Math.floor(most / this.step1) + 1).fill(0);
    staleness.forEach((tau, i) => { this.bars[Math.floor(tau / this.step1)] += gradients[i]; });
    this.show();
  }

  paint(pen) {
    const { area } = this;
    const count = Math.max(this.bars.length, 8); // keeps a few bars narrow
    this.scale = linear(0, count, area.left, area.right);
    const yScale = linear(0, Math.max(...this.bars) * 1.08, area.bottom, area.top);
    drawYAxis(pen, area, yScale, (tick) => short(tick, 3));
    const every = this.step1 * Math.ceil(count / Math.max(1, Math.floor((area.right - area.left) / 44)));
    const ticks = Array.from({ length: Math.ceil((count * this.step1) / every) }, (_, i) => i * every);
    drawXAxis(pen, area, { at: (tau) => this.scale.at(tau / this.step1 + 0.5), ticks: () => ticks }, "versions behind", short);
    this.bars.forEach((gradients, i) => {
      const top = yScale.at(gradients);
      pen.fillStyle = ink("used", i === this.cursor ? 1 : 0.8);
      pen.fillRect(this.scale.at(i) + 1, top, Math.max(1, this.scale.at(i + 1) - this.scale.at(i) - 2), area.bottom - top);
    });
  }

  point(x) {
    const bar = Math.floor(this.scale.value(x));
    this.cursor = bar >= 0 && bar < this.bars.length ? bar : null;
  }

  step({ key }) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (!move) return false;
    this.cursor = clamp((this.cursor ?? -move) + move, 0, this.bars.length - 1);
    return true;
  }

  place() {
    return [this.scale.at(this.cursor + 0.5), this.area.top];
  }

  lines() {
    const from = this.cursor * this.step1;
    const name = this.step1 === 1 ? `staleness ${from}` : `staleness ${from} to ${from + this.step1 - 1}`;
    const gradients = this.bars[this.cursor];
    return [name, `${short(gradients, 7)} gradients, ${short((100 * gradients) / this.total, 3)} %`];
  }
}
