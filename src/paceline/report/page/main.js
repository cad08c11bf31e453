// Construction of the charts of the page.

import { drawAll, leaveOut } from "./chart.js";
import { Curves } from "./curves.js";
import { HeatMap } from "./heat.js";
import { Histogram } from "./histogram.js";
import { Shares } from "./shares.js";
import { Strips } from "./strips.js";
import { listenForTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { unpackUpdates, unpackWork } from "./work.js";

let shownRun = -1;
let timeline = null;

function byId(id) {
  return document.getElementById(id);
}

/** Set the band of a line of one run, which is the line itself. */
function fillBands(groups) {
  for (const group of groups) {
    for (const line of Object.values(group.lines).flatMap((panels) => Object.values(panels))) {
      line.low ??= line.mean;
      line.high ??= line.mean;
    }
  }
}

/** Show the workers of one run. */
async function showRun(data, updates, index) {
  shownRun = index;
  const run = data.runs[index];
  show("round-trips", run.round_trips.some((row) => row), (host) => new Strips(host, run));
  show("heat", run.heat.mean_s.flat().some((value) => value !== null), (host) => new HeatMap(host, run));
  show("shares", run.shares, (host) => new Shares(host, run));
  show("staleness", run.staleness.staleness.length, (host) => new Histogram(host, run));
  const work = await unpackWork(run);
  if (shownRun !== index) return; // another run was selected meanwhile
  timeline = null;
  show("timeline", work.draw.length, (host) => { timeline = new Timeline(host, run, work, updates[index], data.fates); });
  document.documentElement.dataset.shown = index; // for tests: the run is drawn
}

function show(id, isThere, make) {
  leaveOut(byId(id), !isThere);
  if (isThere) make(byId(id));
}

async function start() {
  const data = JSON.parse(byId("data").textContent);
  fillBands(data.groups);
  const updates = [];
  const curves = new Curves(data, updates);
  listenForTheme();
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => timeline?.look(button.dataset.view));
  updates.push(...(await Promise.all(data.runs.map(unpackUpdates))));
  curves.redraw();
  byId("run").addEventListener("change", (event) => showRun(data, updates, event.target.selectedIndex));
  await showRun(data, updates, 0);
}

let started = null;

function begin() {
  started ??= start();
}

requestAnimationFrame(() => setTimeout(begin)); // after the first paint of the page
window.addEventListener("beforeprint", () => {
  begin();
  drawAll();
});
