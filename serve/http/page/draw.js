// Draws the live view's charts, each on its own canvas, in the page's colours.

const HUES = [258, 168, 28, 318, 208, 88, 358, 128, 58, 288];

/** Returns the current colours, which follow the system's light or dark mode. */
export function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return {
    decode: read("--decode"),
    prefill: read("--prefill"),
    cached: read("--cached"),
    free: read("--free"),
    line: read("--line"),
    muted: read("--muted"),
    isDark: matchMedia("(prefers-color-scheme: dark)").matches,
  };
}

/** Returns the colour of a sequence, which stays the same while it runs. */
export function colourOf(number, { isDark }) {
  const hue = HUES[number % HUES.length];
  return isDark ? `hsl(${hue} 62% 62%)` : `hsl(${hue} 58% 52%)`;
}

/** Clears a canvas and returns its context in CSS pixels; null while it is not shown. */
function begin(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  if (!width || !height) return null;
  const scale = Math.min(devicePixelRatio || 1, 3);
  const size = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

/** Returns the smallest of 4, 8, 16... that is not below the value. */
const nice = (value) => 2 ** Math.max(2, Math.ceil(Math.log2(Math.max(1, value))));

function scaleLabel(context, text, colours) {
  context.fillStyle = colours.muted;
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "top";
  context.fillText(text, 2, 2);
}

const BAR = 4;

export const barsIn = (canvas) => Math.ceil(canvas.getBoundingClientRect().width / BAR) + 2;

/** Draws a bar per [milliseconds, decode rows, prefill rows], the newest at the right edge. */
export function drawSteps(canvas, steps, colours, shift) {
  const area = begin(canvas);
  if (!area) return;
  const { context, width, height } = area;
  const most = nice(steps.reduce((high, step) => Math.max(high, step[1] + step[2]), 1));
  // With the square root, one decode row is visible beside a prompt of hundreds.
  const tall = (rows) => (rows ? Math.max(2, Math.sqrt(rows / most) * (height - 16)) : 0);
  context.fillStyle = colours.line;
  context.fillRect(0, height - 1, width, 1);
  for (let i = 0; i < steps.length; i += 1) {
    const [, decode, prefill] = steps[steps.length - 1 - i];
    const x = width - (i + 1 - shift) * BAR;
    if (x < -BAR) break;
    const whole = tall(decode + prefill);
    const lower = decode + prefill ? (whole * decode) / (decode + prefill) : 0;
    const decodeTall = decode ? Math.max(2, lower) : 0;
    context.fillStyle = colours.decode;
    context.fillRect(x, height - 1 - decodeTall, BAR - 1, decodeTall);
    context.fillStyle = colours.prefill;
    context.fillRect(x, height - 1 - whole, BAR - 1, Math.max(0, whole - decodeTall));
  }
  scaleLabel(context, `${most} rows`, colours);
}

/**
 * Draws a cell for each page: first the pages of sequences, then cached pages, then free pages as
 * far as they fit. If the pages in use and cached do not fit, a cell stands for several pages.
 * Returns how many pages are drawn.
 */
export function drawPages(canvas, { pages, sequences }, colours) {
  const area = begin(canvas);
  if (!area) return 0;
  const { context, width, height } = area;
  const known = pages.in_use + pages.cached;
  let side = 12;
  const fit = (size) => Math.floor(width / size) * Math.floor(height / size);
  while (side > 3 && fit(side) < Math.min(pages.total, known + 24)) side -= 1;
  const columns = Math.floor(width / side);
  const cells = Math.min(pages.total, fit(side));
  const share = Math.max(1, Math.ceil(known / Math.max(1, cells))); // pages of a cell
  const paint = (index, colour) => {
    const x = (index % columns) * side;
    const y = Math.floor(index / columns) * side;
    context.fillStyle = colour;
    context.beginPath();
    context.roundRect(x + 0.5, y + 0.5, side - 1.5, side - 1.5, side > 6 ? 2 : 0.5);
    context.fill();
  };
  let cell = 0;
  for (const [number, count] of sequences) {
    for (let i = 0; i < Math.ceil(count / share) && cell < cells; i += 1) {
      paint(cell++, colourOf(number, colours));
    }
  }
  for (let i = 0; i < pages.cached / share && cell < cells; i += 1) paint(cell++, colours.cached);
  while (cell < cells) paint(cell++, colours.free);
  return Math.min(pages.total, cells * share);
}

/** Draws a line of numbers over time, the newest at the right edge. */
export function drawRate(canvas, values, length, colours) {
  const area = begin(canvas);
  if (!area || values.length < 2) return;
  const { context, width, height } = area;
  const most = nice(Math.max(...values));
  const at = (i) => [
    width - ((values.length - 1 - i) / (length - 1)) * width,
    height - 2 - (values[i] / most) * (height - 16),
  ];
  context.beginPath();
  context.moveTo(at(0)[0], height);
  for (let i = 0; i < values.length; i += 1) context.lineTo(...at(i));
  context.lineTo(width, height);
  context.globalAlpha = 0.16;
  context.fillStyle = colours.decode;
  context.fill();
  context.globalAlpha = 1;
  context.beginPath();
  for (let i = 0; i < values.length; i += 1) context.lineTo(...at(i));
  context.strokeStyle = colours.decode;
  context.lineWidth = 1.5;
  context.stroke();
  scaleLabel(context, `${most}/s`, colours);
}
