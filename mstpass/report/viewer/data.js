// The report's data as objects. Columns and the table of strings are described in html.py.

const FATE_NAMES = ["", "saved", "recomputed", "reconstructed"];

function readData() {
  const raw = JSON.parse(document.getElementById("data").textContent);
  const nodes = raw.nodes ? readNodes(raw.nodes, raw.strings) : [];
  return {
    title: raw.title,
    summary: raw.summary,
    regions: rowsOf(raw.regions),
    rejections: rowsOf(raw.rejections),
    saved: rowsOf(raw.saved),
    reconstructed: rowsOf(raw.reconstructed),
    pareto: raw.pareto ? rowsOf(raw.pareto) : [],
    hasDetails: Boolean(raw.nodes),
    nodes,
    byName: new Map(nodes.map((node) => [node.name, node])),
    before: readTimeline(raw.before, raw.strings),
    after: readTimeline(raw.after, raw.strings),
  };
}

function rowsOf(columns) {
  const fields = Object.entries(columns);
  return fields[0][1].map((_, i) =>
    Object.fromEntries(fields.map(([field, values]) => [field, values[i]])),
  );
}

function readNodes(columns, strings) {
  const nodes = columns.name.map((name, index) => ({
    index,
    name: strings[name],
    op: strings[columns.op[index]],
    module: strings[columns.module[index]],
    source: strings[columns.source[index]],
    shape: strings[columns.shape[index]],
    dtype: strings[columns.dtype[index]],
    backward: columns.backward[index] === 1,
    fate: FATE_NAMES[columns.fate[index]],
    region: columns.region[index],
    bytes: columns.bytes[index],
    inputs: [],
    users: [],
  }));
  let at = 0;
  for (const node of nodes) {
    const end = at + columns.num_inputs[node.index];
    for (; at < end; at++) {
      const input = nodes[columns.inputs[at]];
      node.inputs.push(input);
      input.users.push(node);
    }
  }
  return nodes;
}

function readTimeline(raw, strings) {
  if (!raw) return null;
  const lives = raw.lives.node.map((name, i) => ({
    node: strings[name],
    bytes: raw.lives.bytes[i],
    start: raw.lives.start[i],
    end: raw.lives.end[i],
    transient: raw.lives.transient[i] === 1,
  }));
  const peak = raw.bytes.reduce((best, bytes, i) => (bytes > raw.bytes[best] ? i : best), 0);
  return {
    moments: raw.moments.map((name) => strings[name]),
    bytes: raw.bytes,
    firstBackward: raw.first_backward,
    peak,
    lives,
    /** Largest first. */
    aliveAt: (moment) =>
      lives
        .filter((life) => life.start <= moment && moment < life.end)
        .sort((a, b) => b.bytes - a.bytes),
  };
}

/** What the memory timelines name: {text, node}; a loop goes by "loop:" and what it returns. */
function placeOf(data, name) {
  const node = data.byName.get(name.replace(/^loop:/, ""));
  if (!name.startsWith("loop:")) return { text: name, node };
  const region = data.regions[node?.region];
  return { text: `loop of ${region ? region.kind : name.slice(5)}`, node, isLoop: true };
}

/** "2048×256 f32", as far as it is known. */
function shapeText(node) {
  return [node.shape, node.dtype].filter(Boolean).join(" ");
}

function regionText(region) {
  return `${region.kind} · ${region.mode} · ${chunksText(region)}`;
}

function chunksText(region) {
  return region.symbolic
    ? `up to ${region.chunk_tokens} tokens`
    : countText(region.num_chunks, "chunk");
}
