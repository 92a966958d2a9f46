// The panel beside the graph: facts about the selected module, node, band or region.

const LISTED = 12; // links shown at once

/** Returns {element, show(subject)}; `go(node)` is called for a link. */
function inspector(data, lives, go) {
  const element = h("aside.inspector", { "aria-label": "Selection", "aria-live": "polite" });
  const describe = {
    none: () => [
      h("h3", null, "Nothing selected"),
      h("p", null, "Each row is a module, with its forward on the left and its backward on the right. " +
        "Forward runs down the page; backward runs from the last row up."),
      h("p", null, "A band between them is a value that backward gets from forward. Select a row, a node or a band " +
        "to see its facts."),
    ],
    module: (module) => describeModule(module, regionLinks, links),
    node: (node) => describeNode(node, data, lives, regionLinks, links),
    band: (band) => describeBand(band, links),
    region: (region) => describeRegion(region, data, links),
  };
  const links = (nodes, size = true) => {
    const list = h("ul.links");
    const add = (count) => {
      list.querySelector(".more")?.remove();
      for (const node of nodes.slice(list.children.length, count)) {
        const link = button(node.name, () => go(node), { class: "link" });
        list.append(h("li", null, link, size ? h("span.amount", null, bytesText(node.bytes)) : null));
      }
      const rest = nodes.length - list.children.length;
      if (rest > 0) {
        const more = button(`${countText(rest, "more", "more")}`, () => add(Infinity), { class: "quiet" });
        list.append(h("li.more", null, more));
      }
    };
    add(LISTED);
    return list;
  };
  const regionLinks = (indices) =>
    [...indices].map((index) => {
      const region = data.regions[index];
      return h("div", null, button(regionText(region), () => show("region", region), { class: "link" }));
    });
  const show = (kind, subject) => element.replaceChildren(...describe[kind](subject).flat(Infinity));
  show("none");
  return { element, show };
}

function facts(...pairs) {
  const known = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return h(
    "dl",
    null,
    known.map(([name, value]) => [h("dt", null, name), h("dd", null, value)]),
  );
}

function kicker(text) {
  return h("p.kicker", null, text);
}

function describeModule(module, regionLinks, links) {
  const { total } = module;
  const values = [...valuesOf(module)].filter((node) => node.fate === "saved");
  values.sort((a, b) => b.bytes - a.bytes);
  const onHost = values.filter((node) => node.onHost);
  const hostBytes = onHost.reduce((sum, node) => sum + node.bytes, 0);
  const fate = (kind) =>
    total.values[kind] ? `${countText(total.values[kind], "value")}, ${bytesText(total.bytes[kind])}` : "";
  return [
    kicker(module.isGroup ? "Operations" : "Module"),
    h("h3", null, module.isGroup ? module.name : module.path),
    facts(
      ["in module", module.isGroup ? module.path : ""],
      ["forward", countText(total.forward, "operation")],
      ["backward", countText(total.backward, "operation")],
      ["saved", fate("saved")],
      ["of these on the host", onHost.length ? countText(onHost.length, "value") + `, ${bytesText(hostBytes)}` : ""],
      ["recomputed", fate("recomputed")],
      ["reconstructed", fate("reconstructed")],
      ["chunked", total.regions.size ? regionLinks(total.regions) : ""],
    ),
    values.length ? [h("h4", null, "Saved for backward"), links(values)] : [],
  ];
}

function regionsText(indices, data) {
  return [...indices].map((index) => regionText(data.regions[index])).join("; ");
}

function* valuesOf(module) {
  for (const part of partsOf(module)) {
    if (part.module) yield* valuesOf(part.module);
    if (part.forward) yield part.forward;
    if (part.backward) yield part.backward;
  }
}

const FATE_TEXTS = {
  saved: "Forward keeps it for backward.",
  onHost: "Forward copies it to the host and frees it; backward copies it back.",
  recomputed: "Forward frees it after its last use; backward recomputes it.",
  reconstructed: "Forward frees it; backward computes it from later values that are saved anyway.",
};

function describeNode(node, data, lives, regionLinks, links) {
  const rule = data.reconstructed.find((item) => item.node === node.name);
  const life = lives(node.name);
  return [
    kicker(`${node.backward ? "Backward" : "Forward"} operation`),
    h("h3", null, node.op),
    node.fate
      ? h("p", null, tag(node.fate, fateText(node)), " ", FATE_TEXTS[node.onHost ? "onHost" : node.fate])
      : [],
    facts(
      ["name", node.name],
      ["result", shapeText(node)],
      ["bytes", bytesText(node.bytes)],
      ["module", node.module],
      ["source", node.source],
      ["region", node.region >= 0 ? regionLinks([node.region]) : ""],
      ["rule", rule ? `${rule.rule} (${rule.grade}), from ${rule.sources.join(", ")}` : ""],
      ["in memory", life],
    ),
    node.inputs.length ? [h("h4", null, "Inputs"), links(node.inputs)] : [],
    node.users.length ? [h("h4", null, "Used by"), links(node.users)] : [],
  ];
}

const BAND_TITLES = {
  saved: "Saved for backward",
  recomputed: "Recomputed in backward",
  reconstructed: "Reconstructed in backward",
};

function describeBand(band, links) {
  const values = [...band.values].sort((a, b) => b.bytes - a.bytes);
  return [
    kicker(`From ${rowText(band.from)} to ${rowText(band.to)}`),
    h("h3", null, BAND_TITLES[band.fate]),
    h("p", null, tag(band.fate, `${countText(values.length, "value")}, ${bytesText(band.bytes)}`)),
    links(values),
  ];
}

function rowText(row) {
  if (row.module) return row.module.isGroup ? row.module.name : row.module.path;
  return (row.forward ?? row.backward).name;
}

function describeRegion(region, data, links) {
  const index = data.regions.indexOf(region);
  const members = data.nodes.filter((node) => node.region === index);
  return [
    kicker("Region in chunks"),
    h("h3", null, `${region.kind}, ${region.mode}`),
    h("p", null, tag("chunked", chunksText(region)), " ", MODE_TEXTS[region.mode] ?? ""),
    facts(
      ["tokens", region.symbolic ? `${region.num_tokens} when traced` : region.num_tokens],
      ["chunk", `${region.chunk_tokens} tokens`],
      ["large values", bytesText(region.bytes_before)],
      ["in chunks", bytesText(region.bytes_after)],
      ["source", region.source],
      ["note", region.note],
    ),
    members.length ? [h("h4", null, countText(members.length, "operation")), links(members)] : [],
  ];
}

const MODE_TEXTS = {
  fused: "One loop in the forward computes the forward and the gradients.",
  recompute: "The forward loop keeps nothing; the backward loop recomputes each chunk.",
  save: "The forward loop keeps chosen values, and the backward loop reads them.",
};
