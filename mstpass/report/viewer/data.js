// The report's JSON as objects.

function readData() {
  const { title, cached, report, asked, measured } = JSON.parse(document.getElementById("data").textContent);
  const { details, save_plan: plan } = report;
  const copies = plan?.transfers ?? [];
  const nodes = details ? readNodes(details, new Set(copies.map((copy) => copy.node))) : [];
  const byName = new Map(nodes.map((node) => [node.name, node]));
  return {
    title,
    cached,
    report,
    measured,
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
    byName,
    copies: copies.map((copy) => ({
      name: copy.node,
      node: byName.get(copy.node),
      bytes: copy.bytes,
      toHost: copy.to_host,
      start: copy.start_us,
      end: copy.end_us,
      wait: copy.stall_us,
    })),
    forwardUs: plan?.forward_us ?? 0,
    backwardUs: plan?.backward_us ?? 0,
    before: details && readTimeline(details.before),
    after: details && readTimeline(details.after),
  };
}

function readNodes({ nodes: columns, modules, sources }, copied) {
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
    onHost: copied.has(name), // between forward and backward
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

// What stands in front of a name in the memory timelines: mstpass/report/timeline_names.py.
const TIMELINE_TEXTS = {
  loop: (name, region) => `loop of ${region ? region.kind : name}`,
  offload: (name) => `copy of ${name} to the host`,
  offloaded: (name) => `end of the copy of ${name} to the host`,
  reload: (name) => `copy of ${name} from the host`,
};

/** A name of the memory timelines as {text, node}. */
function placeOf(data, name) {
  const [, word, rest] = /^(loop|offload|offloaded|reload):(.*)$/s.exec(name) ?? [null, "", name];
  const node = data.byName.get(rest);
  if (!word) return { text: name, node };
  return { text: TIMELINE_TEXTS[word](rest, data.regions[node?.region]), node, isLoop: word === "loop" };
}

/** "saved", or where else a value waits for backward. */
function fateText(node) {
  return node.onHost ? `${node.fate}, on the host` : node.fate;
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
