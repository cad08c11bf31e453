// Scales from values to pixels, and ticks of axes.

/** A scale with `at(value)` in pixels, `value(pixel)`, and `ticks(most)`. */
export function linear(low, high, begin, end) {
  const span = high - low || 1;
  return {
    low, high,
    at: (value) => begin + ((value - low) / span) * (end - begin),
    value: (pixel) => low + ((pixel - begin) / (end - begin)) * span,
    ticks: (most) => linearTicks(low, high, most),
  };
}

/** A logarithmic scale for positive values. */
export function logarithmic(low, high, begin, end) {
  const inner = linear(Math.log10(low), Math.log10(high), begin, end);
  return {
    low, high,
    at: (value) => inner.at(Math.log10(value)),
    value: (pixel) => 10 ** inner.value(pixel),
    ticks: (most) => logTicks(low, high, most),
  };
}

/** Return a step of 1, 2 or 5 times a power of ten with at most that many ticks. */
export function niceStep(span, most) {
  const rough = span / Math.max(1, most);
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough * 0.999999);
}

function linearTicks(low, high, most) {
  if (!(high > low)) return [low];
  const step = niceStep(high - low, most);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i += 1) ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

function logTicks(low, high, most) {
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const factor of [1, 2, 5]) ticks.push(factor * 10 ** power);
  }
  const inside = ticks.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
  if (inside.length < 2) return linearTicks(low, high, most);
  return inside.length <= most ? inside : inside.filter((tick) => Number.isInteger(Math.log10(tick)) || inside.length < 2 * most && tick.toExponential()[0] === "5");
}
