// The values that backward gets from forward, as bands between the two columns. A band adds up the
// values between two rows on show and is as thick as their bytes. It ends where backward first needs
// a value.

// Ops whose result shares its input's memory: who reads the view needs the input.
const VIEWS = new Set(
  (
    "view _unsafe_view reshape permute transpose t expand unsqueeze squeeze slice select split " +
    "split_with_sizes getitem alias detach as_strided unbind chunk"
  ).split(" "),
);

/** All values that backward gets, as {value, fate, user}, whether their rows are open or not. */
function crossings(nodes) {
  const first = new Array(nodes.length).fill(Infinity);
  for (let i = nodes.length - 1; i >= 0; i--) {
    for (const user of nodes[i].users) {
      if (user.backward) first[i] = Math.min(first[i], user.index);
      else if (user.fate === "recomputed" || VIEWS.has(user.op)) {
        first[i] = Math.min(first[i], first[user.index]);
      }
    }
  }
  return nodes
    .filter((node) => node.fate)
    .map((value) => ({ value, fate: value.fate, user: nodes[first[value.index]] ?? value }));
}

/**
 * The bands between rows, each with its place on the rows' edges: offsets in pixels from the top
 * of the row, and a thickness. `scale` is pixels per byte: the fullest edge fills its row.
 */
function bandsOf(all, shown, rowHeight) {
  const bands = new Map();
  for (const crossing of all) {
    if (!shown[crossing.fate]) continue;
    const from = rowOf(crossing.value);
    const to = rowOf(crossing.user);
    const key = `${from.index} ${to.index} ${crossing.fate}`;
    let band = bands.get(key);
    if (!band) bands.set(key, (band = { from, to, fate: crossing.fate, bytes: 0, values: [] }));
    band.bytes += crossing.value.bytes;
    band.values.push(crossing.value);
  }
  const left = groupBy(bands.values(), (band) => band.from.index);
  const right = groupBy(bands.values(), (band) => band.to.index);
  const sum = (group) => group.reduce((total, band) => total + band.bytes, 0);
  const most = Math.max(1, ...[...left.values(), ...right.values()].map(sum));
  const scale = (rowHeight - 8) / most;
  const stack = (groups, end, place) => {
    for (const group of groups.values()) {
      group.sort((a, b) => a[end].index - b[end].index || a.fate.localeCompare(b.fate));
      let at = (rowHeight - sum(group) * scale) / 2;
      for (const band of group) {
        band[place] = at;
        at += band.bytes * scale;
      }
    }
  };
  stack(left, "to", "fromOffset");
  stack(right, "from", "toOffset");
  for (const band of bands.values()) band.thickness = band.bytes * scale;
  return { bands: [...bands.values()], scale };
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}

const THIN = 4; // pixels: a thinner band has no room for a pattern and is drawn as a dashed line

/** The middle line of a band from the left edge to the right, so that steep bands stay thick. */
function bandPath(width, y0, y1, thickness) {
  const [from, to] = [y0 + thickness / 2, y1 + thickness / 2];
  return `M0 ${from}C${width / 2} ${from} ${width / 2} ${to} ${width} ${to}`;
}

/** Patterns that show the fates without colour: plain, hatched, dotted. */
function patterns() {
  return s(
    "defs",
    null,
    s(
      "pattern",
      { id: "hatch", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect.recomputed.ground", { width: 5, height: 5 }),
      s("rect.recomputed.mark", { width: 1.6, height: 5 }),
    ),
    s(
      "pattern",
      { id: "dots", width: 5, height: 5, patternUnits: "userSpaceOnUse" },
      s("rect.reconstructed.ground", { width: 5, height: 5 }),
      s("circle.reconstructed.mark", { cx: 2.5, cy: 2.5, r: 1.2 }),
    ),
  );
}
