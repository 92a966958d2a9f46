// Copies of saved values to the host and back beside the computation, by estimated times. Each half
// of the step has a plot with two lanes: the device, which computes or waits, and the copies. A wait
// ends when its copy ends.

const COPIES = { height: 104, top: 6, lane: 28, gap: 10, left: 96, right: 14 };
const COPIES_HELP =
  "Times are estimates. Point at a copy or use the arrow keys to read it; select it to see its value in the graph.";

/** The section, or null for a plan without copies; `go(node)` is null without a graph. */
function copiesSection(data, go) {
  const { copies } = data;
  if (!copies.length) return null;
  const note = h("p.caption.reading", { "aria-live": "polite" });
  const read = (copy) => {
    note.textContent = copyText(copy);
    for (const plot of plots) plot.mark(copy.name);
  };
  const [forward, backward] = [true, false].map((toHost) => copies.filter((copy) => copy.toHost === toHost));
  const plots = [
    new CopiesPlot("Forward", "to the host", forward, data.forwardUs, read, go),
    new CopiesPlot("Backward", "from the host", backward, data.backwardUs, read, go),
  ];
  const legend = (kind, text) => h("span.item", null, h(`span.swatch.${kind}`, { "aria-hidden": "true" }), text);
  const us = { text: millisecondsText, number: true };
  const section = h(
    "section.copies",
    { id: "copies", "aria-labelledby": "copies-title" },
    h("h2", { id: "copies-title" }, "Copies beside computation"),
    h("p", null, hiddenText(copies)),
    h("div.legend", null, legend("computing", "the device computes"),
      copies.some((copy) => copy.wait) ? legend("waiting", "the device waits for a copy") : null,
      legend("copy", "a copy")),
    plots.map((plot) => plot.element),
    note,
    sortableTable("Copies", copies, [
      { name: "value", value: (copy) => copy.name,
        cell: (copy) => (go && copy.node ? button(copy.name, () => go(copy.node), { class: "link" }) : copy.name) },
      { name: "copied", value: (copy) => (copy.toHost ? "to the host" : "from the host") },
      { name: "bytes", value: (copy) => copy.bytes, text: bytesText, number: true },
      { name: "start", value: (copy) => copy.start, ...us },
      { name: "end", value: (copy) => copy.end, ...us },
      { name: "takes", value: (copy) => copy.end - copy.start, ...us },
      { name: "device waits", value: (copy) => copy.wait, ...us },
      { name: "module", value: (copy) => copy.node?.module ?? "" },
      { name: "source", value: (copy) => copy.node?.source ?? "" },
    ]),
  );
  note.textContent = COPIES_HELP;
  return section;
}

function millisecondsText(us) {
  return `${us ? (us / 1000).toFixed(us < 1e5 ? 3 : 1) : 0}\u00a0ms`;
}

/** How much of the copies' time is hidden behind computation. */
function hiddenText(copies) {
  const sum = (valueOf) => copies.reduce((total, copy) => total + valueOf(copy), 0);
  const takes = sum((copy) => copy.end - copy.start);
  const waits = sum((copy) => copy.wait);
  const all = `The ${countText(copies.length, "copy", "copies")} take ${millisecondsText(takes)}. `;
  if (!waits) return all + "The device computes all that time and waits for none of them.";
  return all + `The device computes during ${percentText(1 - waits / takes)} of that time and waits during the rest, ` +
    `${millisecondsText(waits)}.`;
}

function copyText({ name, node, bytes, toHost, start, end, wait }) {
  const place = [node?.module, node?.source].filter(Boolean).join(", ");
  const way = toHost ? "to the host" : "from the host";
  const waits = wait ? `; the device waits ${millisecondsText(wait)}` : "; the device does not wait";
  return `${name}${place ? ` (${place})` : ""}: ${bytesText(bytes)} ${way}, from ${millisecondsText(start)} to ` +
    `${millisecondsText(end)}${waits}`;
}

/** One half of the step. Its copies are one stop of the tab key; arrow keys move between them. */
class CopiesPlot {
  constructor(title, way, copies, computeUs, read, go) {
    Object.assign(this, { way, copies, read, go });
    const waitUs = copies.reduce((total, copy) => total + copy.wait, 0);
    this.endUs = Math.max(computeUs + waitUs, ...copies.map((copy) => copy.end), 1e-3);
    this.active = 0;
    this.marked = null;
    this.bars = [];
    this.plot = s("svg.plot", { role: "group", "aria-label": `${title}: copies ${way}` });
    this.plot.addEventListener("keydown", (event) => this.onKey(event));
    const facts = ` ${millisecondsText(computeUs)} of computation` +
      (waitUs ? `, ${millisecondsText(waitUs)} of waits` : "");
    this.element = h("div.half", null, h("h3", null, title, h("span.quiet", null, facts)), this.plot);
    new ResizeObserver(() => this.draw()).observe(this.plot);
  }

  draw() {
    const { height, top, lane, gap, left, right } = COPIES;
    const width = Math.max(300, this.plot.clientWidth || 1000);
    const x = (us) => left + (us / this.endUs) * (width - left - right);
    const [device, copies] = [top, top + lane + gap];
    const bottom = copies + lane;
    const label = (text, y) => s("text.lane", { x: left - 10, y: y + lane / 2 + 4, "text-anchor": "end" }, text);
    const focused = this.plot.contains(document.activeElement);
    this.bars = this.copies.map((copy, i) => this.bar(copy, i, x, copies));
    this.plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.plot.replaceChildren(
      waitPattern(),
      ...timeTicks(this.endUs, x, top, bottom + 4),
      s("text.lane", { x: left - 10, y: bottom + 19, "text-anchor": "end" }, "estimated ms"),
      label("device", device),
      label(this.way, copies),
      s("rect.computing", { x: x(0), y: device, width: x(this.endUs) - x(0), height: lane }),
      ...this.copies.filter((copy) => copy.wait).map((copy) => waitBox(copy, x, device)),
      ...this.bars,
    );
    if (this.marked !== null) this.mark(this.marked);
    if (focused) this.bars[this.active]?.focus();
  }

  bar(copy, index, x, y) {
    const { name, node, start, end } = copy;
    const width = Math.max(x(end) - x(start) - 1, 1.5);
    const fits = width > 7.2 * name.length + 10;
    const open = this.go && node ? () => this.go(node) : null;
    const about = () => this.read(copy);
    return s("g.copy",
      { role: open ? "button" : "img", tabindex: index === this.active ? 0 : -1, "aria-label": copyText(copy),
        pointerenter: about, focus: () => { this.activate(index); about(); }, ...(open && { click: open }) },
      s("title", null, copyText(copy)),
      s("rect", { x: x(start), y, width, height: COPIES.lane, rx: width < 6 ? 0 : 3 }),
      fits ? s("text", { x: x(start) + 6, y: y + COPIES.lane / 2 + 4 }, name) : null);
  }

  /** Shows which copies are of one value. */
  mark(name) {
    this.marked = name;
    this.bars.forEach((bar, i) => bar.classList.toggle("marked", this.copies[i].name === name));
  }

  /** The copy that the tab key comes to. */
  activate(index) {
    this.bars[this.active].setAttribute("tabindex", -1);
    this.active = index;
    this.bars[index].setAttribute("tabindex", 0);
  }

  onKey(event) {
    const last = this.copies.length - 1;
    const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -last, End: last };
    const copy = this.copies[this.active];
    if (event.key in steps) this.bars[clamp(this.active + steps[event.key], 0, last)].focus();
    else if (event.key !== "Enter" && event.key !== " ") return;
    else if (this.go && copy.node) this.go(copy.node);
    event.preventDefault();
  }
}

/** The device has nothing to do until the copy ends. */
function waitBox({ name, end, wait }, x, y) {
  const width = Math.max(x(end) - x(end - wait), 1.5);
  return s("rect.waiting", { x: x(end) - width, y, width, height: COPIES.lane },
    s("title", null, `The device waits ${millisecondsText(wait)} for the copy of ${name}`));
}

function waitPattern() {
  return s("defs", null,
    s("pattern",
      { id: "waits", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(-45)" },
      s("rect.waiting-ground", { width: 6, height: 6 }),
      s("rect.waiting-mark", { width: 2.4, height: 6 })));
}
