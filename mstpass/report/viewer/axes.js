// Axes of plots: round numbers, and lines across the plot for round numbers of bytes and of time.

/** Lines and labels of round numbers of bytes from 0 to `highest`; `y(bytes)` is in pixels. */
function byteTicks(highest, y, left, right) {
  const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(highest, 1)) / 10));
  return roundSteps(0, highest / unit).map((count) => {
    const bytes = count * unit;
    return s("g.tick", null,
      s("line", { x1: left, x2: right, y1: y(bytes), y2: y(bytes) }),
      s("text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end" }, tickText(bytesText(bytes))));
  });
}

/** Lines and labels of round numbers of milliseconds from 0 to `endUs`; `x(us)` is in pixels. */
function timeTicks(endUs, x, top, bottom) {
  return roundSteps(0, endUs / 1000).map((ms) => {
    const at = x(ms * 1000);
    const text = Number(ms.toPrecision(6)).toLocaleString("en", { maximumFractionDigits: 6 });
    return s("g.tick", null,
      s("line", { x1: at, x2: at, y1: top, y2: bottom }),
      s("text", { x: at, y: bottom + 15, "text-anchor": "middle" }, text));
  });
}

/** Up to six round numbers between two. */
function roundSteps(low, high) {
  const least = (high - low) / 5;
  const power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= least);
  const steps = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) steps.push(i * step);
  return steps;
}

/** The text of a round number: "100 MiB", not "100.0 MiB". */
function tickText(text) {
  return text.replace(/\.0(?=\s)/, "");
}

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
