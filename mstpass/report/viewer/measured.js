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

function measuredCurves({ curve, measured_peak_bytes: measured, simulated_peak_bytes: simulated }) {
  const axes = { width: 1000, height: 220, left: 64, right: 12, top: 22, base: 200 };
  const highest = Math.max(measured, simulated, 1);
  const y = (bytes) => axes.base - (bytes / highest) * (axes.base - axes.top);
  const x = (share) => axes.left + share * (axes.width - axes.left - axes.right);
  const path = (key) =>
    "M" + curve.map((point, i) => {
      const from = i ? curve[i - 1].share : 0;
      return `${x(from).toFixed(1)} ${y(point[key]).toFixed(1)}H${x(point.share).toFixed(1)}`;
    }).join("L");
  const line = (kind, key) => s(`g.series.${kind}`, null, s("path.line", { d: path(key) }));
  const key = (kind, label, peak) =>
    h("label", null, h(`span.key.${kind}`, { "aria-hidden": "true" }), `${label}, peak ${bytesText(peak)} `);
  return h(
    "section.memory",
    { id: "measured", "aria-labelledby": "measured-title" },
    h("h2", { id: "measured-title" }, "Measured"),
    h("div.legend", null, key("before", "measured", measured), key("after", "as planned", simulated)),
    s("svg.plot", { viewBox: `0 0 ${axes.width} ${axes.height}`, role: "img", "aria-label": "Measured and simulated memory" },
      ...byteTicks(highest, y, axes.left, axes.width - axes.right),
      line("before", "measured_bytes"),
      line("after", "simulated_bytes")),
    h("p.caption", null, MEASURED_CAPTION),
  );
}
