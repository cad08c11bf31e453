// Tasks of one run by worker, its updates, and their shares of intervals of time.

import { lastAtMost } from "./format.js";
import { summed, unpack } from "./unpack.js";

/** Unpack the tasks of a run: begin and end in seconds, draw, version, staleness, ending; `first` is the first task of each worker. */
export async function unpackWork(run) {
  const columns = await unpack(run.work);
  const count = columns.draw.length;
  const begin = new Float64Array(count);
  const end = new Float64Array(count);
  const first = [0];
  for (const pieces of run.work.per_worker) {
    let quanta = 0;
    for (let i = first.at(-1); i < first.at(-1) + pieces; i += 1) {
      begin[i] = (quanta += columns.idle[i]) * run.quantum_s;
      end[i] = (quanta += columns.busy[i]) * run.quantum_s;
    }
    first.push(first.at(-1) + pieces);
  }
  const { staleness, ending } = columns;
  return { begin, end, first, staleness, ending, draw: summed(columns.draw), version: summed(columns.version) };
}

/** Unpack the updates of a run: time in time steps, k, workload, and the numbers of its reasons. */
export async function unpackUpdates(run) {
  const columns = await unpack(run.updates);
  for (const name of ["time", "workload", "reason", "quorum_reason"]) summed(columns[name]);
  return columns;
}

/** Return the range of tasks of a worker that overlap the interval `from` to `to`: the first one, and the one after the last. */
export function within(work, worker, from, to) {
  const [begin, end] = [work.first[worker], work.first[worker + 1]];
  return [Math.max(begin, lastAtMost(work.begin, from, begin, end)), lastAtMost(work.begin, to, begin, end) + 1];
}

/** Return the share of each pixel that tasks of each fate cover, one row per fate. */
export function coverage(work, worker, view, width, fateOf, fates) {
  const shares = Array.from({ length: fates }, () => new Float32Array(width));
  const scale = width / (view.to - view.from);
  const [begin, end] = within(work, worker, view.from, view.to);
  for (let i = begin; i < end; i += 1) {
    const left = Math.max(0, (work.begin[i] - view.from) * scale);
    const right = Math.min(width, (work.end[i] - view.from) * scale);
    if (right > left) cover(shares[fateOf[work.ending[i]]], left, right);
  }
  return shares;
}

function cover(row, left, right) {
  const first = Math.floor(left);
  const last = Math.min(Math.ceil(right) - 1, row.length - 1);
  if (first === last) {
    row[first] += right - left;
    return;
  }
  row[first] += first + 1 - left;
  for (let x = first + 1; x < last; x += 1) row[x] = 1;
  row[last] += right - last;
}
