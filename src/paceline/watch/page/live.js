// Live page: draws the sections that the server sends, each of which replaces its earlier content.

import { drawAll, leaveOut } from "./chart.js";
import { Curves } from "./curves.js";
import { HeatMap } from "./heat.js";
import { Histogram } from "./histogram.js";
import { Shares } from "./shares.js";
import { Strips } from "./strips.js";
import { listenForTheme } from "./theme.js";
import { Timeline } from "./timeline.js";
import { unpackUpdates, unpackWork } from "./work.js";

const LATE_MS = 6000; // without an event, of which the server sends one a second
const charts = {};
const updates = [];
const latest = {};
let curves = null;
let lateness = null;

function byId(id) {
  return document.getElementById(id);
}

function showState({ state, text, headline }) {
  byId("headline").textContent = headline;
  byId("state").textContent = text;
  byId("state").className = `state ${state}`;
  document.title = `${state}: ${headline}`;
  document.documentElement.dataset.state = state;
}

function showLost() {
  if (document.documentElement.dataset.state?.match(/ended|stopped/)) return; // the server of train --serve ends with the run
  byId("state").className = "state lost";
  byId("state").textContent = "no connection to the server: this is the last known state; the page reconnects by itself";
  document.documentElement.dataset.state = "lost";
}

/** Show HTML that the server has escaped. */
function showTexts(texts) {
  for (const [id, html] of Object.entries(texts)) byId(id).innerHTML = html;
  byId("decided").hidden = !texts.decisions;
  byId("so-far").hidden = !texts.table;
}

/** Return the lines of one run on each axis; all lines of a table share its positions. */
function linesOf(tables) {
  const lines = { time: {}, updates: {}, workload: {} };
  for (const { names, columns } of tables) {
    for (const [axis, panels] of Object.entries(lines)) {
      for (const [panel, column, steps] of names) {
        if (columns[column].some((value) => value !== null)) panels[panel] = finite(columns[axis], columns[column], steps);
      }
    }
  }
  return lines;
}

function finite(x, y, steps) {
  const known = y.map((value, i) => (value === null ? -1 : i)).filter((i) => i >= 0);
  const mean = known.map((i) => y[i]);
  return { x: known.map((i) => x[i]), mean, low: mean, high: mean, steps };
}

function showCurves() {
  const { panels, axes, tables, switches, first_update } = latest.curves;
  const { label, quantum_s, reasons, first_protocol } = latest.run;
  for (const [name, title] of Object.entries(panels)) if (!byId(name)) addMetric(name, title);
  const run = { label, quantum_s, reasons, first_protocol, switches, first_update };
  const data = { panels, axes, runs: [run], groups: [{ label, runs: [0], lines: linesOf(tables) }] };
  if (curves) curves.update(data);
  else curves = new Curves(data, updates);
}

function addMetric(name, title) {
  const part = document.createElement("div");
  part.className = "part";
  part.append(Object.assign(document.createElement("h3"), { textContent: title[0].toUpperCase() + title.slice(1) }));
  part.append(Object.assign(document.createElement("div"), { className: "chart", id: name }));
  byId("metrics").append(part);
}

async function showTasks(run) {
  const [work, columns] = await Promise.all([unpackWork(run), unpackUpdates(run)]);
  if (latest.tasks !== run) return; // newer ones have arrived meanwhile
  latest.run = run;
  updates[0] = columns;
  show("round-trips", run.round_trips.some((row) => row), Strips, run);
  show("heat", run.heat.mean_s.flat().some((value) => value !== null), HeatMap, run);
  show("shares", run.shares, Shares, run);
  show("staleness", run.staleness.staleness.length, Histogram, run);
  show("timeline", work.draw.length, Timeline, run, work, columns, run.fates);
  showCurves();
}

function show(id, isThere, Kind, ...content) {
  leaveOut(byId(id), !isThere);
  if (!isThere) return;
  if (charts[id]) charts[id].update(...content);
  else charts[id] = new Kind(byId(id), ...content);
}

async function receive(event) {
  clearTimeout(lateness);
  lateness = setTimeout(showLost, LATE_MS);
  const sections = JSON.parse(event.data);
  Object.assign(latest, sections);
  if (sections.texts) showTexts(sections.texts);
  if (sections.tasks) await showTasks(sections.tasks);
  else if (sections.curves && latest.run) showCurves();
  if (latest.state) showState(latest.state); // newer sections may have arrived while the tasks were unpacked
}

function start() {
  listenForTheme();
  window.addEventListener("beforeprint", drawAll);
  for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => charts.timeline?.look(button.dataset.view));
  const source = new EventSource(`events${location.search}`);
  source.addEventListener("message", receive);
  source.addEventListener("error", showLost);
}

start();
