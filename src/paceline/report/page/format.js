// Formatting of numbers.

/** Format a number with at most that many significant digits, as 1,234 or 0.0123. */
export function short(value, digits = 4) {
  if (value === null || !Number.isFinite(value)) return "unknown";
  if (value !== 0 && Math.abs(value) < 1e-4) return value.toExponential(digits - 1);
  return value.toLocaleString("en", { maximumSignificantDigits: digits });
}

/** Format a time in seconds. */
export function seconds(value, digits = 4) {
  return `${short(value, digits)} s`;
}

/** Return the index of the last element of an ascending array that is at most the value, -1 without one. */
export function lastAtMost(sorted, value, begin = 0, end = sorted.length) {
  let low = begin;
  let high = end;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

export function clamp(value, least, most) {
  return Math.max(least, Math.min(most, value));
}
