// The page from top to bottom.

function summarySection(data) {
  const { report, regions, rejections, saved, solver } = data;
  const { peak_bytes: peak, baseline_peak_bytes: before, extra_time: extra } = report;
  const bytesOf = (values) => values.reduce((sum, value) => sum + value.bytes, 0);
  const onDevice = saved.filter((value) => !value.on_host);
  const onHost = saved.filter((value) => value.on_host);
  return h(
    "section.summary",
    { "aria-labelledby": "title" },
    h("p.kicker", null, data.title + (data.cached ? " · graph from the compile cache" : "")),
    h("h1", { id: "title" }, headline(report)),
    h(
      "div.cards",
      null,
      card("Peak of the step", peak === null ? "unknown" : bytesText(peak),
        peak !== null && before !== null ? peakBars(peak, before) :
          report.no_plan ? "there is no plan" : "a size depends on data"),
      card("Saved for backward", bytesText(bytesOf(onDevice)),
        countText(onDevice.length, "value") + (solver ? `, chosen by ${solver}` : "") +
          (onHost.length ? `; on the host ${onHost.length} more, ${bytesText(bytesOf(onHost))}` : "")),
      card("Extra time", extra === null ? "unknown" : percentText(extra),
        extra === null ? "there is no step to compare with" : "estimated, relative to Inductor alone"),
      card("Regions in chunks", String(regions.length),
        [...groupBy(regions, (region) => region.kind)].map(([kind, group]) => `${group.length} ${kind}`).join(", ") +
          (regions.length ? "; " : "") + `${rejections.length} not in chunks`),
    ),
    report.notes.map((note) => h("p.note", { role: "note" }, note)),
  );
}

function headline(report) {
  const { peak_bytes: peak, baseline_peak_bytes: before, extra_time: extra } = report;
  if (report.no_plan) return `There is no plan: ${report.no_plan}.`;
  if (peak === null) return "The peak of this step is not known.";
  const strong = (bytes) => h("strong", null, bytesText(bytes));
  if (before === null) return ["The step peaks at ", strong(peak), "."];
  const time =
    extra === null || Math.abs(extra) < 0.0005
      ? "in the same time"
      : `for ${percentText(Math.abs(extra))} ${extra > 0 ? "more" : "less"} time`;
  if (peak === before) return ["The step peaks at ", strong(peak), ", the same as under Inductor alone."];
  const change = `${percentText(Math.abs(1 - peak / before))} ${peak < before ? "less" : "more"}`;
  return ["The step peaks at ", strong(peak), " instead of ", strong(before), `: ${change}, ${time}.`];
}

function card(title, figure, under) {
  return h("div.card", null, h("h3", null, title), h("p.figure", null, figure), h("div.under", null, under));
}

function peakBars(peak, before) {
  const most = Math.max(peak, before, 1);
  const bar = (kind, bytes, text) => {
    const fillBar = h(`span.fill.${kind}`);
    fillBar.style.width = `${(100 * bytes) / most}%`;
    return h("div.compare", null, h("span.what", null, text), h("span.track", null, fillBar),
      h("span.amount", null, bytesText(bytes)));
  };
  return [bar("before", before, "Inductor alone"), bar("after", peak, "as planned")];
}

function start() {
  const data = timed("read", readData);
  const { report } = data;
  const main = document.getElementById("main");
  main.append(summarySection(data));
  const sections = [];
  let graph = null;
  if (data.nodes.length) {
    graph = new GraphView(data);
    sections.push([graph.section, "Graph"]);
  }
  if (data.before || data.after) sections.push([new MemoryView(data, (node) => graph?.reveal(node)).section, "Memory"]);
  measuredSections(data).forEach((section, i) => sections.push([section, i ? "" : "Measured"]));
  const copies = copiesSection(data, graph && ((node) => graph.reveal(node)));
  if (copies) sections.push([copies, "Copies"]);
  if (report.details) sections.push([paretoSection(data), "Peak against time"]);
  else {
    main.append(h("p.note", { role: "note" },
      "This report has the plan alone, without the graph and the memory over time. " +
        "To see these, explain or compile the step again."));
  }
  const names = ["In chunks", "Not in chunks", "Saved", "Reconstructed"];
  tableSections(data, graph).forEach((section, i) => sections.push([section, names[i]]));
  main.append(...sections.map(([section]) => section));
  document.getElementById("sections").append(
    ...sections.filter(([, name]) => name).map(([section, name]) => h("a", { href: `#${section.id}` }, name)),
  );
}

timed("start", start);
