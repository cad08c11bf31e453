// Colours, dashes and textures; each colour has a pattern of its own for colour-blind readers.

export const DASHES = [[], [9, 4], [2, 3], [12, 3, 2, 3], [5, 2], [16, 5]];
export const SERIES = 6;
const HATCH = 6; // pixels from one stripe to the next

let probe = null;

/** Return the colour of a custom property in the current theme as [red, green, blue]. */
export function rgb(name) {
  probe ??= document.body.appendChild(Object.assign(document.createElement("i"), { hidden: true }));
  probe.style.color = `var(--${name})`;
  return getComputedStyle(probe).color.match(/[\d.]+/g).slice(0, 3).map(Number);
}

/** Return the same colour as text for a canvas. */
export function ink(name, opacity = 1) {
  return `rgb(${rgb(name).join(" ")} / ${opacity})`;
}

export function seriesInk(index, opacity = 1) {
  return ink(`series-${index % SERIES}`, opacity);
}

export function dash(index) {
  return DASHES[index % DASHES.length];
}

/** Return whether a pixel is in a light stripe of the texture of a fate. */
export function isStripe(fate, x, y) {
  if (fate === "dropped") return (x + y) % HATCH < 2;
  if (fate === "interrupted") return y % (HATCH - 1) < 2;
  if (fate === "unfinished") return x % (HATCH - 1) < 2;
  return false;
}

/** Return a short line for a legend. */
export function lineSample(index) {
  const line = `<line x1="0" y1="6" x2="38" y2="6" stroke="var(--series-${index % SERIES})" stroke-width="2.5" stroke-dasharray="${dash(index).join(" ")}"/>`;
  return `<svg width="38" height="12" aria-hidden="true">${line}</svg>`;
}
