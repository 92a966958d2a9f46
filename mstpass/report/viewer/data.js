// The report's JSON as objects.

function readData() {
  const { title, cached, report, asked } = JSON.parse(document.getElementById("data").textContent);
  const { details, save_plan: plan } = report;
  const nodes = details ? readNodes(details) : [];
  return {
    title,
    cached,
    report,
    regions: report.regions,
    rejections: report.rejections,
    /** Those about which the user can do something; the page sums the others up. */
    asked: report.rejections.filter((_, i) => asked[i]),
    unasked: report.rejections.filter((_, i) => !asked[i]),
    saved: plan?.saved ?? [],
    reconstructed: plan?.reconstructed ?? [],
    solver: plan?.solver ?? "",
    pareto: details?.pareto ?? [],
    nodes,
    byName: new Map(nodes.map((node) => [node.name, node])),
    before: details && readTimeline(details.before),
    after: details && readTimeline(details.after),
  };
}

function readNodes({ nodes: columns, modules, sources }) {
  const nodes = columns.name.map((name, index) => ({
    index,
    name,
    op: columns.op[index],
    module: modules[columns.module[index]],
    source: sources[columns.source[index]],
    shape: columns.shape[index],
    dtype: columns.dtype[index],
    backward: columns.phase[index] === "backward",
    fate: columns.fate[index],
    region: columns.region[index],
    bytes: columns.bytes[index],
    inputs: [],
    users: [],
  }));
  for (const node of nodes) {
    node.inputs = columns.inputs[node.index].map((input) => nodes[input]);
    for (const input of node.inputs) input.users.push(node);
  }
  return nodes;
}

function readTimeline(columns) {
  if (!columns?.moments.length) return null;
  const lives = columns.lives.node.map((node, i) => ({
    node,
    bytes: columns.lives.bytes[i],
    start: columns.lives.start[i],
    end: columns.lives.end[i],
    transient: columns.lives.transient[i] === 1,
  }));
  const { moments, bytes, first_backward: firstBackward } = columns;
  return {
    moments,
    bytes,
    firstBackward,
    peak: bytes.indexOf(bytes.reduce((most, one) => Math.max(most, one), 0)),
    lives,
    /** Largest first. */
    aliveAt: (moment) =>
      lives
        .filter((life) => life.start <= moment && moment < life.end)
        .sort((a, b) => b.bytes - a.bytes),
  };
}

/** A name of the memory timelines as {text, node}. A loop is "loop:" and the first node it returns. */
function placeOf(data, name) {
  const node = data.byName.get(name.replace(/^loop:/, ""));
  if (!name.startsWith("loop:")) return { text: name, node };
  const region = data.regions[node?.region];
  return { text: `loop of ${region ? region.kind : name.slice(5)}`, node, isLoop: true };
}

/** "2048×256 f32"; unknown parts are left out. */
function shapeText(node) {
  return [node.shape.join("×"), node.dtype].filter(Boolean).join(" ");
}

function regionText(region) {
  return `${region.kind} · ${region.mode} · ${chunksText(region)}`;
}

function chunksText(region) {
  return region.symbolic
    ? `up to ${region.chunk_tokens} tokens`
    : countText(region.num_chunks, "chunk");
}
