// The joint graph: rows of modules and nodes with forward on the left, backward on the right, and
// bands between them. Only the rows in sight are in the document. The scroller has the focus and
// names its active row.

function graphSection(data) {
  const tree = buildTree(data.nodes);
  const all = crossings(data.nodes);
  const shown = { saved: true, recomputed: false, reconstructed: true };
  const lives = (name) => lifeText(data.after, name);
  const panel = inspector(data, lives, (node) => reveal(node));
  let rows = [];
  let drawn = { bands: [], scale: 1 };
  let active = { row: 0, side: "forward" };
  let selected = null; // a module, node, band or region
  let rowHeight = 28;

  const sizer = h("div.sizer", { role: "presentation" });
  const svg = s("svg.bands", { "aria-hidden": "true" });
  const scroller = h(
    "div.rows",
    { role: "treegrid", tabindex: 0, "aria-label": "Joint graph by module", "aria-colcount": 2 },
    sizer,
  );
  const scaleNote = h("span.scale");
  const crumb = h("span.crumb"); // where the first row on show is
  const boxes = ["saved", "recomputed", "reconstructed"].map((fate) => legendBox(fate));
  const section = h(
    "section.graph",
    { id: "graph", "aria-labelledby": "graph-title" },
    h("h2", { id: "graph-title" }, "Joint graph"),
    h(
      "div.bar",
      null,
      searchBox(data, tree, (found) => (found.node ? reveal(found.node) : revealModule(found.module))),
      h(
        "div.buttons",
        { role: "group", "aria-label": "Open and close modules" },
        button("Close all", () => refold(() => setOpen(false))),
        button("Layers", () => refold(() => openToLayers(tree))),
        button("Open all", () => refold(() => setOpen(true))),
      ),
    ),
    h("div.legend", { role: "group", "aria-label": "Legend" }, boxes, tag("chunked", "runs in chunks"), scaleNote),
    h(
      "div.split",
      null,
      h(
        "div.columns",
        null,
        h("div.heads", { "aria-hidden": "true" },
          h("span", null, "Forward ↓", crumb), h("span", null, "to backward"), h("span", null, "Backward ↑")),
        scroller,
      ),
      panel.element,
    ),
  );

  function legendBox(fate) {
    const change = (event) => {
      shown[fate] = event.target.checked;
      rebuild();
      draw();
    };
    const box = h("input", { type: "checkbox", change, "aria-label": `Show bands of ${fate} values` });
    box.checked = shown[fate];
    return h("label", null, box, tag(fate, fate), h(`span.swatch.${fate}`, { "aria-hidden": "true" }));
  }

  function setOpen(open) {
    for (const module of everyModule(tree.root)) module.open = open;
  }

  /** Opens or closes rows; the active row stays active, or else the row that now contains it. */
  function refold(change) {
    timed("fold", () => {
      const row = rows[active.row];
      change();
      rebuild();
      const module = row?.module;
      const kept = module ? rows.find((other) => other.module === module) ?? module.row : null;
      active.row = kept ? kept.index : Math.min(active.row, rows.length - 1);
      scrollTo(active.row);
      draw();
    });
  }

  function rebuild() {
    rows = flatten(tree.root);
    rowHeight = parseFloat(getComputedStyle(section).getPropertyValue("--row")) || 28;
    drawn = bandsOf(all, shown, rowHeight);
    scaleNote.textContent = drawn.bands.length
      ? `a band as high as a row is ${bytesText((rowHeight - 8) / drawn.scale)}`
      : "";
    sizer.style.height = `${rows.length * rowHeight}px`;
    scroller.setAttribute("aria-rowcount", rows.length);
  }

  /** The rows in sight, and the bands that touch them. */
  function draw() {
    const top = scroller.scrollTop;
    const height = scroller.clientHeight || 600;
    const first = Math.max(0, Math.floor(top / rowHeight) - 4);
    const last = Math.min(rows.length, Math.ceil((top + height) / rowHeight) + 4);
    crumb.textContent = rows[Math.ceil(top / rowHeight)]?.parent.path ?? "";
    const parts = rows.slice(first, last).map((row) => rowElement(row));
    sizer.replaceChildren(svg, ...parts);
    const id = `row-${active.row}`;
    if (active.row >= first && active.row < last) scroller.setAttribute("aria-activedescendant", id);
    else scroller.removeAttribute("aria-activedescendant");
    drawBands(top, height);
  }

  function drawBands(top, height) {
    const width = svg.clientWidth || 1;
    svg.style.top = `${top}px`;
    svg.style.height = `${height}px`;
    svg.setAttribute("viewBox", `0 ${top} ${width} ${height}`);
    const margin = 2;
    const inSight = drawn.bands.filter((band) => {
      const low = Math.min(band.from.index, band.to.index) * rowHeight;
      const high = (Math.max(band.from.index, band.to.index) + 1) * rowHeight;
      return high >= top && low <= top + height;
    });
    inSight.sort((a, b) => b.bytes - a.bytes); // thin ones stay on top
    svg.replaceChildren(
      patterns(),
      ...inSight.map((band) => {
        const y0 = band.from.index * rowHeight + band.fromOffset;
        const y1 = band.to.index * rowHeight + band.toOffset;
        const path = s(
          `path.band.${band.fate}${band.thickness < THIN ? ".thin" : ""}${band === selected ? ".selected" : ""}`,
          {
            d: bandPath(width - 2 * margin, y0, y1, band.thickness),
            transform: `translate(${margin} 0)`,
            "stroke-width": Math.max(band.thickness, 1.2),
          },
          s("title", null, `${BAND_TITLES[band.fate]}: ${bytesText(band.bytes)}, ${rowText(band.from)} to ${rowText(band.to)}`),
        );
        path.addEventListener("click", () => select("band", band));
        return path;
      }),
    );
  }

  function rowElement(row) {
    const isActive = row.index === active.row;
    const element = h("div.row", {
      id: `row-${row.index}`,
      role: "row",
      "aria-rowindex": row.index + 1,
      "aria-level": row.depth + 1,
      "aria-expanded": row.module ? String(row.module.open) : null,
      "aria-selected": String(isActive),
      "data-index": row.index,
    });
    element.style.top = `${row.index * rowHeight}px`;
    element.style.setProperty("--depth", row.depth);
    if (isActive) element.classList.add("active");
    if (row.module) {
      element.classList.add("module");
      if (row.module === selected) element.classList.add("selected");
      element.append(...moduleCells(row.module, data));
    } else {
      element.append(...["forward", "backward"].map((side) => {
        const cell = nodeCell(row[side], side);
        cell.classList.toggle("active", isActive && active.side === side);
        cell.classList.toggle("selected", row[side] !== null && row[side] === selected);
        return cell;
      }));
    }
    return element;
  }

  function show(kind, subject) {
    selected = subject;
    panel.show(kind, subject);
  }

  function select(kind, subject) {
    show(kind, subject);
    draw();
  }

  function toggle(module, open = !module.open) {
    refold(() => (module.open = open));
  }

  function openAbove(module) {
    for (let parent = module; parent; parent = parent.parent) parent.open = true;
  }

  function reveal(node) {
    timed("reveal", () => {
      openAbove(node.home);
      rebuild();
      show("node", node);
      activate(node.row.index, node.backward ? "backward" : "forward", true);
    });
  }

  function revealModule(module) {
    openAbove(module.parent);
    rebuild();
    show("module", module);
    activate(rows.findIndex((row) => row.module === module), "forward", true);
  }

  function activate(index, side = active.side, centred = false) {
    const row = rows[index];
    if (!row) return;
    active = { row: index, side };
    if (!row.module && !row[side]) active.side = side === "forward" ? "backward" : "forward";
    scrollTo(index, centred);
    draw();
  }

  function scrollTo(index, centred = false) {
    const at = index * rowHeight;
    const height = scroller.clientHeight;
    if (centred) scroller.scrollTop = at - height / 2;
    else if (at < scroller.scrollTop) scroller.scrollTop = at;
    else if (at + rowHeight > scroller.scrollTop + height) scroller.scrollTop = at + rowHeight - height;
  }

  scroller.addEventListener("scroll", () => requestAnimationFrame(draw), { passive: true });
  scroller.addEventListener("click", (event) => {
    const element = event.target.closest(".row");
    if (!element) return;
    const row = rows[Number(element.dataset.index)];
    const cell = event.target.closest("[data-node]");
    active = { row: row.index, side: cell?.classList.contains("backward") ? "backward" : "forward" };
    if (cell) select("node", data.nodes[Number(cell.dataset.node)]);
    else if (row.module) {
      show("module", row.module);
      toggle(row.module);
    }
  });
  scroller.addEventListener("keydown", (event) => {
    const row = rows[active.row];
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(scroller.clientHeight / rowHeight) - 1);
    const jumps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -rows.length, End: rows.length };
    if (event.key in jumps) {
      activate(Math.min(rows.length - 1, Math.max(0, active.row + jumps[event.key])));
    } else if (event.key === "ArrowRight") {
      if (!row.module) activate(active.row, "backward");
      else if (!row.module.open) toggle(row.module, true);
      else activate(active.row + 1);
    } else if (event.key === "ArrowLeft") {
      if (!row.module && active.side === "backward" && row.forward) activate(active.row, "forward");
      else if (row.module?.open) toggle(row.module, false);
      else activate(rows.findIndex((other) => other.module && other.module === row.parent));
    } else if (event.key === "Enter" || event.key === " ") {
      if (row.module) select("module", row.module);
      else select("node", row[active.side]);
    } else return;
    event.preventDefault();
  });

  openToLayers(tree);
  rebuild();
  new ResizeObserver(() => {
    rebuild(); // rows are higher on a narrow screen
    draw();
  }).observe(section);
  return {
    section,
    reveal: (node) => {
      reveal(node);
      section.scrollIntoView({ block: "start" });
    },
    revealRegion: (region) => {
      const member = data.nodes.find((node) => node.region === data.regions.indexOf(region));
      if (member) reveal(member);
      select("region", region);
      section.scrollIntoView({ block: "start" });
    },
  };
}
