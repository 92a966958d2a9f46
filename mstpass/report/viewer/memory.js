// Memory of the step over time, without chunks and as planned. The two have different numbers of
// moments, so each half is stretched: forward's moments share the left part of the axis, backward's
// the right part.

const MEMORY = { width: 1000, height: 260, top: 22, bottom: 26, left: 64, right: 12 };
const LIVE = 30; // tensors listed at once

function memorySection(data, go) {
  const series = [];
  if (data.before) series.push({ key: "before", label: "without chunks", line: data.before });
  if (data.after) series.push({ key: "after", label: "as planned", line: data.after });
  const highest = Math.max(...series.map(({ line }) => line.bytes[line.peak]));
  const size = { ...MEMORY };
  let read = series.at(-1);
  let moment = read.line.peak;
  let pinned = false;

  const plot = s("svg.plot", {
    role: "slider",
    tabindex: 0,
    "aria-label": "Moment of the step; arrow keys move it",
    "aria-valuemin": 0,
  });
  const heading = h("h3");
  const list = h("div.live");
  const choices = series.map((one) => {
    const input = h("input", { type: "radio", name: "series", change: () => choose(one) });
    input.checked = one === read;
    return h("label", null, input, h(`span.key.${one.key}`, { "aria-hidden": "true" }),
      `${one.label}, peak ${bytesText(one.line.bytes[one.line.peak])}`);
  });
  const section = h(
    "section.memory",
    { id: "memory", "aria-labelledby": "memory-title" },
    h("h2", { id: "memory-title" }, "Memory over the step"),
    h("div.bar", null,
      h("div.legend", { role: "radiogroup", "aria-label": "Read" }, choices),
      h("div.buttons", null, button("Go to the peak", () => move(read.line.peak)))),
    plot,
    h("p.caption", null,
      "Simulated bytes beyond what was allocated when forward began. Each moment is one op or one loop. " +
      "Point at a moment, tap it, or use the arrow keys to see what is in memory; a click holds the moment."),
    heading,
    list,
  );

  /** Where backward begins on the axis, as a fraction: the mean over both steps. */
  const boundary = clamp(
    series.reduce((sum, { line }) => sum + line.firstBackward / line.moments.length, 0) / series.length,
    0.2, 0.8,
  );
  const position = (line, at) => {
    const first = line.firstBackward;
    const rest = line.moments.length - first;
    return at <= first && first > 0
      ? (boundary * at) / first
      : boundary + (1 - boundary) * ((at - first) / Math.max(rest, 1));
  };
  const momentAt = (line, fraction) => {
    const first = line.firstBackward;
    const at = fraction < boundary
      ? (fraction / boundary) * first
      : first + ((fraction - boundary) / (1 - boundary)) * (line.moments.length - first);
    return clamp(Math.floor(at), 0, line.moments.length - 1);
  };
  const x = (fraction) => size.left + fraction * (size.width - size.left - size.right);
  const y = (bytes) => size.height - size.bottom - (bytes / highest) * (size.height - size.top - size.bottom);

  /** A stepped line. Of moments that share half a pixel the highest is drawn, so peaks stay. */
  function outline(line) {
    const points = [];
    let column = -1;
    for (let i = 0; i < line.moments.length; i++) {
      const x0 = x(position(line, i));
      const x1 = x(position(line, i + 1));
      const here = Math.floor(x0 * 2);
      const bytes = line.bytes[i];
      if (here === column) {
        const last = points.at(-1);
        last.bytes = Math.max(last.bytes, bytes);
        last.x1 = x1;
      } else points.push({ x0, x1, bytes });
      column = here;
    }
    return points.map((p) => `${p.x0.toFixed(1)} ${y(p.bytes).toFixed(1)}H${p.x1.toFixed(1)}`).join("L");
  }

  const cursor = s("g.cursor");
  function drawPlot() {
    size.width = Math.max(320, plot.clientWidth || MEMORY.width);
    size.left = size.width < 500 ? 60 : MEMORY.left;
    plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    const base = size.height - size.bottom;
    const middle = x(boundary);
    plot.replaceChildren(
      ...ticksOf(highest).map((bytes) =>
        s("g.tick", null,
          s("line", { x1: size.left, x2: size.width - size.right, y1: y(bytes), y2: y(bytes) }),
          s("text", { x: size.left - 8, y: y(bytes) + 4, "text-anchor": "end" }, tickText(bytesText(bytes))))),
      ...series.map(({ key, line }) => {
        const path = outline(line);
        const [start, end] = [x(0), x(1)];
        return s(`g.series.${key}`, null,
          s("path.area", { d: `M${start} ${base}L${path}V${base}Z` }),
          s("path.line", { d: `M${path}`, "data-end": end }));
      }),
      s("line.boundary", { x1: middle, x2: middle, y1: size.top - 8, y2: base }),
      s("text.phase", { x: (x(0) + middle) / 2, y: size.height - 7, "text-anchor": "middle" }, "forward"),
      s("text.phase", { x: (middle + x(1)) / 2, y: size.height - 7, "text-anchor": "middle" }, "backward"),
      ...series.map((one) => peakMark(one)),
      cursor,
    );
    drawCursor();
  }

  function middleOf(line, at) {
    return x((position(line, at) + position(line, at + 1)) / 2);
  }

  function peakMark({ key, line }) {
    const bytes = line.bytes[line.peak];
    const px = middleOf(line, line.peak);
    const flip = px > size.width - 130;
    return s(`g.peak.${key}`, null,
      s("path", { d: `M${px} ${y(bytes) - 2}l-5 -8h10z` }),
      s("text", { x: px + (flip ? -9 : 9), y: y(bytes) - 5, "text-anchor": flip ? "end" : "start" }, bytesText(bytes)));
  }

  function drawCursor() {
    const px = middleOf(read.line, moment);
    cursor.replaceChildren(
      s("line", { x1: px, x2: px, y1: size.top - 8, y2: size.height - size.bottom }),
      s(`circle.${read.key}`, { cx: px, cy: y(read.line.bytes[moment]), r: 4.5 }),
    );
  }

  function move(to) {
    moment = clamp(to, 0, read.line.moments.length - 1);
    timed("moment", () => {
      drawCursor();
      describe();
    });
  }

  function choose(one) {
    const fraction = position(read.line, moment);
    const wasPeak = moment === read.line.peak;
    read = one;
    plot.setAttribute("aria-valuemax", read.line.moments.length - 1);
    move(wasPeak ? read.line.peak : momentAt(read.line, fraction));
  }

  function describe() {
    const { line } = read;
    const alive = line.aliveAt(moment);
    const phase = moment < line.firstBackward ? "forward" : "backward";
    const total = line.bytes[moment];
    const peak = moment === line.peak ? ", the peak" : "";
    const running = placeOf(data, line.moments[moment]).text;
    heading.replaceChildren(
      `${bytesText(total)}${peak}`,
      h("span.quiet", null, ` in ${countText(alive.length, "tensor")} while ${running} runs, moment ` +
        `${moment + 1} of ${line.moments.length}, ${phase}, ${read.label}`),
    );
    plot.setAttribute("aria-valuenow", moment);
    plot.setAttribute("aria-valuetext",
      `${bytesText(total)}${peak} at ${running}, ${phase}, ${countText(alive.length, "tensor")}`);
    list.replaceChildren(liveTable(alive, total, data, go));
  }

  plot.addEventListener("pointermove", (event) => {
    if (!pinned || event.buttons) point(event);
  });
  plot.addEventListener("pointerdown", (event) => {
    point(event);
    pinned = !pinned || event.pointerType !== "mouse";
  });
  function point(event) {
    const box = plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * size.width;
    const fraction = (at - size.left) / (size.width - size.left - size.right);
    move(momentAt(read.line, clamp(fraction, 0, 1)));
  }
  plot.addEventListener("keydown", (event) => {
    const last = read.line.moments.length - 1;
    const page = Math.max(10, Math.round(last / 20));
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: page, PageDown: -page };
    if (event.key in steps) move(moment + steps[event.key]);
    else if (event.key === "Home") move(0);
    else if (event.key === "End") move(last);
    else return;
    event.preventDefault();
  });
  new ResizeObserver(() => drawPlot()).observe(plot);
  choose(read);
  return section;
}

/** The tensors in memory, the largest first, each with a bar for its share of the bytes. */
function liveTable(alive, total, data, go, count = LIVE) {
  const body = alive.slice(0, count).map((life) => {
    const { text, node, isLoop } = placeOf(data, life.node);
    const name = node ? button(text, () => go(node), { class: "link" }) : text;
    const share = h("span.share");
    share.style.width = `${(100 * life.bytes) / Math.max(total, 1)}%`;
    return h("tr", null,
      h("td.number", null, bytesText(life.bytes)),
      h("td.bar-cell", { "aria-hidden": "true" }, share),
      h("td.wide", null, name, life.transient ? h("span.quiet", null, " at this moment only") : null,
        node?.fate && !isLoop ? [" ", tag(node.fate, node.fate)] : null),
      h("td", null, node?.module ?? ""),
      h("td", null, node?.source ?? ""));
  });
  const rest = alive.slice(count);
  const restBytes = rest.reduce((sum, life) => sum + life.bytes, 0);
  const table = h("table", null,
    h("thead", null, h("tr", null, h("th.number", null, "bytes"), h("th.bar-cell", { "aria-hidden": "true" }),
      h("th", null, "tensor"), h("th", null, "module"), h("th", null, "source"))),
    h("tbody", null, body));
  if (!rest.length) return table;
  const more = button(`${countText(rest.length, "more", "more")}, ${bytesText(restBytes)}`,
    () => holder.replaceWith(liveTable(alive, total, data, go, Infinity)), { class: "quiet" });
  const holder = h("div", null, table, more);
  return holder;
}

/** Bytes from 0 to `highest` that are round in their unit. */
function ticksOf(highest) {
  const unit = 2 ** (10 * Math.floor(Math.log2(Math.max(highest, 1)) / 10));
  return roundSteps(0, highest / unit).map((ticks) => ticks * unit);
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

function clamp(value, low, high) {
  return Math.min(high, Math.max(low, value));
}
