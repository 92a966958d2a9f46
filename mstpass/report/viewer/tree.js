// The joint graph as a tree of modules. Rows are in forward's order. The backward of a module stands
// beside its forward, so backward runs from the last row up. The module's own nodes between two
// children (a slot) stand between these two, on both sides.

const LONG_RUN = 6; // if a module has more nodes of its own in a slot, they are one row

function buildTree(nodes) {
  const root = newModule("", null);
  root.name = "step";
  const byPath = new Map([["", root]]);
  const homeOf = (path) => {
    const known = byPath.get(path);
    if (known) return known;
    const dot = path.lastIndexOf(".");
    const module = newModule(path, homeOf(dot < 0 ? "" : path.slice(0, dot)));
    module.name = path.slice(dot + 1);
    if (/^\d+$/.test(module.name) && module.parent !== root) {
      module.name = `${module.parent.name}.${module.name}`;
      module.isLayer = true;
    }
    byPath.set(path, module);
    return module;
  };
  const inputs = newModule("", root);
  Object.assign(inputs, { name: "inputs of the step", isGroup: true });

  if (nodes.some((node) => isInput(node) && !node.module)) place(inputs);
  for (const node of nodes) {
    node.home = isInput(node) && !node.module ? inputs : homeOf(node.module);
    if (node.backward || isInput(node)) continue; // inputs come in the order of the arguments
    place(node.home);
    node.home.runs.at(-1).forward.push(node);
  }
  for (let i = nodes.length - 1; i >= 0; i--) {
    if (nodes[i].backward) placeBackward(nodes[i]);
    else if (isInput(nodes[i])) {
      place(nodes[i].home);
      nodes[i].home.runs[0].forward.unshift(nodes[i]);
    }
  }
  foldLongRuns(root);
  count(root);
  return { root, byPath };
}

function isInput(node) {
  return node.op === "input";
}

function newModule(path, parent) {
  return {
    path,
    parent,
    name: path,
    depth: parent ? parent.depth + 1 : -1,
    isLayer: false,
    isGroup: false,
    open: false,
    row: null, // while it is not open on show: the row that stands for it
    parts: null,
    inner: null,
    placed: parent === null,
    slot: -1, // index into the parent's children
    cursor: 0, // the slot that the next backward node of its own goes to
    children: [],
    runs: [{ forward: [], backward: [] }], // one more than children
  };
}

function place(module) {
  for (; !module.placed; module = module.parent) {
    module.placed = true;
    module.slot = module.parent.children.push(module) - 1;
    module.parent.runs.push({ forward: [], backward: [] });
  }
}

/** Called from the last backward node to the first. */
function placeBackward(node) {
  place(node.home);
  node.home.runs[node.home.cursor].backward.push(node);
  for (let module = node.home; module.parent; module = module.parent) {
    module.parent.cursor = module.slot + 1;
  }
}

function foldLongRuns(module) {
  module.children.forEach(foldLongRuns);
  if (!module.children.length) return;
  module.runs = module.runs.map((run) => {
    const size = Math.max(run.forward.length, run.backward.length);
    if (size <= LONG_RUN) return run;
    const group = newModule(module.path, module);
    const name = module.parent ? "own operations" : "outside any module";
    Object.assign(group, { name, isGroup: true, placed: true, runs: [run] });
    for (const node of [...run.forward, ...run.backward]) node.home = group;
    return { forward: [], backward: [], group };
  });
}

function count(module) {
  const total = {
    forward: 0,
    backward: 0,
    bytes: { saved: 0, recomputed: 0, reconstructed: 0 },
    values: { saved: 0, recomputed: 0, reconstructed: 0 },
    regions: new Set(),
  };
  for (const part of partsOf(module)) {
    if (part.module) {
      const other = count(part.module);
      total.forward += other.forward;
      total.backward += other.backward;
      for (const fate in total.bytes) {
        total.bytes[fate] += other.bytes[fate];
        total.values[fate] += other.values[fate];
      }
      other.regions.forEach((region) => total.regions.add(region));
    } else {
      for (const node of [part.forward, part.backward]) {
        if (!node) continue;
        if (!isInput(node)) total[node.backward ? "backward" : "forward"] += 1;
        if (node.region >= 0) total.regions.add(node.region);
        if (!node.fate) continue;
        total.bytes[node.fate] += node.bytes;
        total.values[node.fate] += 1;
      }
    }
  }
  module.total = total;
  return total;
}

/** What an open module shows, in order: child modules, and pairs of forward and backward nodes. */
function partsOf(module) {
  if (module.parts) return module.parts;
  const parts = (module.parts = []);
  module.runs.forEach((run, slot) => {
    if (run.group) parts.push({ module: run.group });
    const size = Math.max(run.forward.length, run.backward.length);
    for (let i = 0; i < size; i++) {
      parts.push({ forward: run.forward[i] ?? null, backward: run.backward[i] ?? null });
    }
    if (slot < module.children.length) parts.push({ module: module.children[slot] });
  });
  return parts;
}

/** The rows on show. A module that is not open on show notes the row that stands for it. */
function flatten(root) {
  const rows = [];
  const hide = (module, row) => {
    module.row = row;
    for (const inner of everyModule(module)) inner.row = row;
  };
  const show = (module) => {
    module.row = null;
    for (const part of partsOf(module)) {
      const row = { ...part, parent: module, depth: module.depth + 1, index: rows.length };
      rows.push(row);
      if (!part.module) {
        if (part.forward) part.forward.row = row;
        if (part.backward) part.backward.row = row;
      } else if (part.module.open) show(part.module);
      else hide(part.module, row);
    }
  };
  show(root);
  return rows;
}

function rowOf(node) {
  return node.home.row ?? node.row;
}

/** All modules and groups inside one. */
function everyModule(module) {
  return (module.inner ??= partsOf(module).flatMap((part) =>
    part.module ? [part.module, ...everyModule(part.module)] : [],
  ));
}

/** Show the layers, closed: what a reader wants first. Without layers, the outermost modules. */
function openToLayers(tree) {
  for (const module of everyModule(tree.root)) module.open = false;
  for (const module of tree.byPath.values()) {
    if (!module.isLayer) continue;
    let outermost = module;
    for (let parent = module.parent; parent; parent = parent.parent) {
      if (parent.isLayer) outermost = parent;
    }
    for (let parent = outermost.parent; parent; parent = parent.parent) parent.open = true;
  }
  tree.root.open = true;
}

/** Opens a module and all that contain it. */
function openWithParents(module) {
  for (let parent = module; parent; parent = parent.parent) parent.open = true;
}
