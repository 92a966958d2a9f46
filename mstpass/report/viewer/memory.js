// Memory of the step over time, under Inductor alone and as planned. The two have different numbers of
// moments, so each half is stretched: forward's moments share the left part of the axis, backward's
// the right part.

const LIVE = 30; // tensors listed at once
const CAPTION =
  "Simulated bytes beyond what was allocated when forward began. Each moment is one op or one loop. " +
  "Point at a moment, tap it, or use the arrow keys to see what is in memory; a click holds the moment.";

/** Where moments and bytes stand in the plot, in pixels. */
class MemoryAxes {
  constructor(lines) {
    Object.assign(this, { width: 1000, height: 260, top: 22, bottom: 26, left: 64, right: 12 });
    this.highest = Math.max(...lines.map((line) => line.bytes[line.peak]));
    const starts = lines.map((line) => line.firstBackward / line.moments.length);
    /** Where backward begins, as a fraction of the axis: the mean over the timelines. */
    this.boundary = clamp(starts.reduce((sum, start) => sum + start, 0) / lines.length, 0.2, 0.8);
  }

  setWidth(width) {
    this.width = Math.max(320, width);
    this.left = this.width < 500 ? 60 : 64;
  }

  get base() {
    return this.height - this.bottom;
  }

  x(fraction) {
    return this.left + fraction * (this.width - this.left - this.right);
  }

  y(bytes) {
    return this.base - (bytes / this.highest) * (this.base - this.top);
  }

  /** A moment of a timeline as a fraction of the axis. */
  position(line, moment) {
    const first = line.firstBackward;
    if (moment <= first && first > 0) return (this.boundary * moment) / first;
    const rest = Math.max(line.moments.length - first, 1);
    return this.boundary + ((1 - this.boundary) * (moment - first)) / rest;
  }

  momentAt(line, fraction) {
    const first = line.firstBackward;
    const moment = fraction < this.boundary
      ? (fraction / this.boundary) * first
      : first + ((fraction - this.boundary) / (1 - this.boundary)) * (line.moments.length - first);
    return clamp(Math.floor(moment), 0, line.moments.length - 1);
  }

  middle(line, moment) {
    return this.x((this.position(line, moment) + this.position(line, moment + 1)) / 2);
  }

  /** A stepped line. Of moments that share half a pixel the highest is drawn, so peaks stay. */
  outline(line) {
    const points = [];
    let column = -1;
    for (let i = 0; i < line.moments.length; i++) {
      const x0 = this.x(this.position(line, i));
      const x1 = this.x(this.position(line, i + 1));
      const here = Math.floor(x0 * 2);
      const bytes = line.bytes[i];
      if (here === column) {
        const last = points.at(-1);
        last.bytes = Math.max(last.bytes, bytes);
        last.x1 = x1;
      } else points.push({ x0, x1, bytes });
      column = here;
    }
    return points.map((p) => `${p.x0.toFixed(1)} ${this.y(p.bytes).toFixed(1)}H${p.x1.toFixed(1)}`).join("L");
  }
}

class MemoryView {
  constructor(data, go) {
    this.data = data;
    this.go = go;
    this.series = [];
    if (data.before) this.series.push({ key: "before", label: "Inductor alone", line: data.before });
    if (data.after) this.series.push({ key: "after", label: "as planned", line: data.after });
    this.axes = new MemoryAxes(this.series.map(({ line }) => line));
    this.read = this.series.at(-1); // the timeline that is read
    this.moment = this.read.line.peak;
    this.held = false;
    this.makePlot();
    this.section = this.makeSection();
    new ResizeObserver(() => this.drawPlot()).observe(this.plot);
    this.choose(this.read);
  }

  // ---- elements --------------------------------------------------------------------------------
  makePlot() {
    this.plot = s("svg.plot", {
      role: "slider",
      tabindex: 0,
      "aria-label": "Moment of the step; arrow keys move it",
      "aria-valuemin": 0,
    });
    this.cursor = s("g.cursor");
    this.plot.addEventListener("pointermove", (event) => {
      if (!this.held || event.buttons) this.point(event);
    });
    this.plot.addEventListener("pointerdown", (event) => {
      this.point(event);
      this.held = !this.held || event.pointerType !== "mouse";
    });
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
  }

  makeSection() {
    this.heading = h("h3");
    this.list = h("div.live");
    const choices = this.series.map((one) => {
      const input = h("input", { type: "radio", name: "series", change: () => this.choose(one) });
      input.checked = one === this.read;
      const peak = bytesText(one.line.bytes[one.line.peak]);
      return h("label", null, input, h(`span.key.${one.key}`, { "aria-hidden": "true" }), `${one.label}, peak ${peak}`);
    });
    return h(
      "section.memory",
      { id: "memory", "aria-labelledby": "memory-title" },
      h("h2", { id: "memory-title" }, "Memory over the step"),
      h("div.bar", null,
        h("div.legend", { role: "radiogroup", "aria-label": "Timeline" }, choices),
        h("div.buttons", null, button("Go to the peak", () => this.move(this.read.line.peak)))),
      this.plot,
      h("p.caption", null, CAPTION),
      this.heading,
      this.list,
    );
  }

  drawPlot() {
    const { axes } = this;
    axes.setWidth(this.plot.clientWidth || axes.width);
    this.plot.setAttribute("viewBox", `0 0 ${axes.width} ${axes.height}`);
    const middle = axes.x(axes.boundary);
    const phase = (text, from, to) =>
      s("text.phase", { x: (from + to) / 2, y: axes.height - 7, "text-anchor": "middle" }, text);
    this.plot.replaceChildren(
      ...byteTicks(axes.highest, (bytes) => axes.y(bytes), axes.left, axes.width - axes.right),
      ...this.series.map(({ key, line }) => {
        const path = axes.outline(line);
        return s(`g.series.${key}`, null,
          s("path.area", { d: `M${axes.x(0)} ${axes.base}L${path}V${axes.base}Z` }),
          s("path.line", { d: `M${path}` }));
      }),
      s("line.boundary", { x1: middle, x2: middle, y1: axes.top - 8, y2: axes.base }),
      phase("forward", axes.x(0), middle),
      phase("backward", middle, axes.x(1)),
      ...this.series.map((one) => this.peakMark(one)),
      this.cursor,
    );
    this.drawCursor();
  }

  peakMark({ key, line }) {
    const { axes } = this;
    const bytes = line.bytes[line.peak];
    const px = axes.middle(line, line.peak);
    const flip = px > axes.width - 130;
    return s(`g.peak.${key}`, null,
      s("path", { d: `M${px} ${axes.y(bytes) - 2}l-5 -8h10z` }),
      s("text", { x: px + (flip ? -9 : 9), y: axes.y(bytes) - 5, "text-anchor": flip ? "end" : "start" }, bytesText(bytes)));
  }

  drawCursor() {
    const { axes, read, moment } = this;
    const px = axes.middle(read.line, moment);
    this.cursor.replaceChildren(
      s("line", { x1: px, x2: px, y1: axes.top - 8, y2: axes.base }),
      s(`circle.${read.key}`, { cx: px, cy: axes.y(read.line.bytes[moment]), r: 4.5 }),
    );
  }

  // ---- the moment that is read -----------------------------------------------------------------
  move(moment) {
    this.moment = clamp(moment, 0, this.read.line.moments.length - 1);
    timed("moment", () => {
      this.drawCursor();
      this.describe();
    });
  }

  /** Reads the other timeline, at its peak or at the same place of the axis. */
  choose(one) {
    const fraction = this.axes.position(this.read.line, this.moment);
    const wasPeak = this.moment === this.read.line.peak;
    this.read = one;
    this.plot.setAttribute("aria-valuemax", one.line.moments.length - 1);
    this.move(wasPeak ? one.line.peak : this.axes.momentAt(one.line, fraction));
  }

  describe() {
    const { moment } = this;
    const { line, label } = this.read;
    const alive = line.aliveAt(moment);
    const phase = moment < line.firstBackward ? "forward" : "backward";
    const total = line.bytes[moment];
    const size = bytesText(total) + (moment === line.peak ? ", the peak" : "");
    const running = placeOf(this.data, line.moments[moment]).text;
    const tensors = countText(alive.length, "tensor");
    this.heading.replaceChildren(
      size,
      h("span.quiet", null, ` in ${tensors} while ${running} runs, moment ${moment + 1} of ` +
        `${line.moments.length}, ${phase}, ${label}`),
    );
    this.plot.setAttribute("aria-valuenow", moment);
    this.plot.setAttribute("aria-valuetext", `${size} at ${running}, ${phase}, ${tensors}`);
    this.list.replaceChildren(liveTable(alive, total, this.data, this.go));
  }

  point(event) {
    const { axes } = this;
    const box = this.plot.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * axes.width;
    const fraction = (at - axes.left) / (axes.width - axes.left - axes.right);
    this.move(axes.momentAt(this.read.line, clamp(fraction, 0, 1)));
  }

  onKey(event) {
    const last = this.read.line.moments.length - 1;
    const page = Math.max(10, Math.round(last / 20));
    const steps = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1, PageUp: page, PageDown: -page };
    if (event.key in steps) this.move(this.moment + steps[event.key]);
    else if (event.key === "Home") this.move(0);
    else if (event.key === "End") this.move(last);
    else return;
    event.preventDefault();
  }
}

/** The tensors in memory, the largest first, each with a bar for its share of the bytes. */
function liveTable(alive, total, data, go, count = LIVE) {
  const body = alive.slice(0, count).map((life) => liveRow(life, total, data, go));
  const rest = alive.slice(count);
  const table = h("table", null,
    h("thead", null, h("tr", null, h("th.number", null, "bytes"), h("th.bar-cell", { "aria-hidden": "true" }),
      h("th", null, "tensor"), h("th", null, "module"), h("th", null, "source"))),
    h("tbody", null, body));
  if (!rest.length) return table;
  const restBytes = rest.reduce((sum, life) => sum + life.bytes, 0);
  const more = button(`${countText(rest.length, "more", "more")}, ${bytesText(restBytes)}`,
    () => holder.replaceWith(liveTable(alive, total, data, go, Infinity)), { class: "quiet" });
  const holder = h("div", null, table, more);
  return holder;
}

function liveRow(life, total, data, go) {
  const { text, node, isLoop } = placeOf(data, life.node);
  const name = node ? button(text, () => go(node), { class: "link" }) : text;
  const share = h("span.share");
  share.style.width = `${(100 * life.bytes) / Math.max(total, 1)}%`;
  return h("tr", null,
    h("td.number", null, bytesText(life.bytes)),
    h("td.bar-cell", { "aria-hidden": "true" }, share),
    h("td.wide", null, name, life.transient ? h("span.quiet", null, " at this moment only") : null,
      node?.fate && !isLoop ? [" ", tag(node.fate, fateText(node))] : null),
    h("td", null, node?.module ?? ""),
    h("td", null, node?.source ?? ""));
}
