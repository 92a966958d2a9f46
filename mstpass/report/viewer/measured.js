// A measured step beside the plan: there only if the page was written with a comparison.

const MEASURED_CAPTION =
  "The axis is the share of all bytes that have been allocated so far, in order: a measured step and " +
  "its plan have no clock in common. Blocks are matched with the plan's buffers by their sizes.";

function measuredSections({ measured }) {
  if (!measured) return [];
  const bytes = { text: bytesText, number: true };
  const columns = [
    { name: "bytes", value: (block) => block.bytes, ...bytes },
    { name: "blocks", value: (block) => block.count, number: true },
    { name: "in the plan", value: (block) => block.node },
    { name: "source", value: (block) => block.source },
  ];
  const { blocks, not_in_plan: unplanned, not_measured: unmeasured } = measured;
  return [
    measuredCurves(measured),
    tableSection("measured-blocks", "In memory at the measured peak", blocks, "Nothing.", columns),
    tableSection("not-in-plan", "Not in the plan at its peak", unplanned, "Nothing large.", columns),
    tableSection("not-measured", "In the plan at its peak, but not measured", unmeasured, "Nothing large.", columns),
  ];
}

const MEASURED_SERIES = [
  { kind: "before", name: "measured", key: "measured_bytes", peak: "measured_peak_bytes" },
  { kind: "after", name: "as planned", key: "simulated_bytes", peak: "simulated_peak_bytes" },
];

function measuredCurves(measured) {
  const plot = s("svg.plot", { role: "img", "aria-label": "Measured and simulated memory" });
  new ResizeObserver(() => drawMeasured(plot, measured)).observe(plot);
  const legend = ({ kind, name, peak }) =>
    h("span.item", null, h(`span.key.${kind}`, { "aria-hidden": "true" }), `${name}, peak ${bytesText(measured[peak])}`);
  return h(
    "section.measured",
    { id: "measured", "aria-labelledby": "measured-title" },
    h("h2", { id: "measured-title" }, "Measured"),
    h("div.legend", null, MEASURED_SERIES.map(legend)),
    plot,
    h("p.caption", null, MEASURED_CAPTION),
  );
}

function drawMeasured(plot, measured) {
  const { curve } = measured;
  const [height, top, base, left, right] = [260, 22, 222, 64, 12];
  const width = Math.max(320, plot.clientWidth || 1000);
  const highest = Math.max(...MEASURED_SERIES.map(({ peak }) => measured[peak]), 1);
  const y = (bytes) => base - (bytes / highest) * (base - top);
  const x = (share) => left + share * (width - left - right);
  const line = ({ kind, key }) => {
    const path = curve.map((point, i) => {
      const from = i ? curve[i - 1].share : 0;
      return `${x(from).toFixed(1)} ${y(point[key]).toFixed(1)}H${x(point.share).toFixed(1)}`;
    });
    return s(`g.series.${kind}`, null, s("path.line", { d: `M${path.join("L")}` }));
  };
  const label = (text, at, below) => s("text", { x: at, y: base + below, "text-anchor": "middle" }, text);
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren(
    ...byteTicks(highest, y, left, width - right),
    ...[0.25, 0.5, 0.75].map((share) => label(tickText(percentText(share)), x(share), 16)),
    label("of the bytes that the step allocates", x(0.5), 33),
    ...MEASURED_SERIES.map(line),
  );
}
