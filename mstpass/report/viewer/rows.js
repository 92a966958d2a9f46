// One row of the graph: a module's two sides, or a pair of nodes.

function moduleCells(module, data) {
  const { total } = module;
  const amounts = ["saved", "reconstructed"]
    .filter((fate) => total.values[fate])
    .map((fate) => h(`span.amount.${fate}`, null, glyph(fate), bytesText(total.bytes[fate])));
  return [
    h(
      "div.cell.forward",
      { role: "gridcell" },
      s("svg.arrow", { viewBox: "0 0 10 10", "aria-hidden": "true" }, s("path", { d: "M3 1.5 7 5 3 8.5" })),
      h("span.title", { title: module.path }, module.name),
      total.regions.size ? h("span.chips", null, chip(module, data)) : null,
      h("span.quiet", null, total.forward ? countText(total.forward, "op") : ""),
      h("span.amounts", null, amounts),
    ),
    h(
      "div.cell.backward",
      { role: "gridcell" },
      h("span.quiet", null, total.backward ? countText(total.backward, "op") : ""),
      total.values.recomputed
        ? h("span.amount.recomputed", { title: `${countText(total.values.recomputed, "value")} recomputed` },
            glyph("recomputed"), `${total.values.recomputed}`, h("span.word", null, " recomputed"))
        : null,
    ),
  ];
}

function nodeCell(node, side) {
  if (!node) return h(`div.cell.${side}`, { role: "gridcell" });
  const inChunks = node.region >= 0;
  return h(
    `div.cell.node.${side}`,
    { role: "gridcell", "data-node": node.index },
    node.fate ? glyph(node.fate) : null,
    inChunks ? glyph("chunked") : null,
    h("span.op", null, node.op),
    h("span.name", { title: node.name }, node.name),
    h(`span.fate.${node.fate || "chunked"}`, null, fateText(node) || (inChunks ? "chunked" : "")),
    h("span.amount", null, node.bytes ? bytesText(node.bytes) : ""),
  );
}

function chip(module, data) {
  const indices = module.total.regions;
  const region = data.regions[[...indices][0]];
  const many = indices.size > 1 || module.children.some((child) => child.isLayer);
  const text = many ? countText(indices.size, "region") : `${region.mode} ${chunksText(region)}`;
  return h("span.tag.chunked", { title: regionsText(indices, data) }, glyph("chunked"), h("span.word", null, text));
}

/** When a value is in memory, in words. */
function lifeText(timeline, name) {
  const life = timeline?.lives.find((other) => other.node === name && !other.transient);
  if (!life) return "";
  const back = timeline.lives.find((other) => other.node === `reload:${name}`);
  const place = (moment) => (moment < timeline.firstBackward ? "forward" : "backward");
  const span = ({ start, end }) => `${start} to ${end - 1}`;
  const again = back ? `, and ${span(back)}, back from the host,` : "";
  const places = `${place(life.start)} to ${place((back ?? life).end - 1)}`;
  return `moments ${span(life)}${again} of ${timeline.moments.length} (${places})`;
}
