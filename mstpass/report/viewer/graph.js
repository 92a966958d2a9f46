// The joint graph: rows of modules and nodes with forward on the left, backward on the right, and
// bands between them. Only the rows in sight are in the document. The scroller has the focus and
// names its active row.

const FATES = ["saved", "recomputed", "reconstructed"];
const MARGIN_ROWS = 4; // drawn above and below those in sight
const BAND_MARGIN = 2; // pixels left and right of the bands

class GraphView {
  constructor(data) {
    this.data = data;
    this.tree = buildTree(data.nodes);
    this.crossings = crossings(data.nodes);
    this.shown = { saved: true, recomputed: false, reconstructed: true };
    this.panel = inspector(data, (name) => lifeText(data.after, name), (node) => this.openNode(node));
    this.rows = [];
    this.drawn = { bands: [], scale: 1 };
    this.active = { row: 0, side: "forward" };
    this.selected = null; // a module, node, band or region
    this.rowHeight = 28;
    this.makeScroller();
    this.section = this.makeSection();
    openToLayers(this.tree);
    this.rebuild();
    new ResizeObserver(() => {
      this.rebuild(); // rows are higher on a narrow screen
      this.draw();
    }).observe(this.section);
  }

  // ---- elements --------------------------------------------------------------------------------
  makeScroller() {
    this.sizer = h("div.sizer", { role: "presentation" });
    this.svg = s("svg.bands", { "aria-hidden": "true" });
    this.scroller = h(
      "div.rows",
      { role: "treegrid", tabindex: 0, "aria-label": "Joint graph by module", "aria-colcount": 2 },
      this.sizer,
    );
    this.scroller.addEventListener("scroll", () => requestAnimationFrame(() => this.draw()), { passive: true });
    this.scroller.addEventListener("click", (event) => this.onClick(event));
    this.scroller.addEventListener("keydown", (event) => this.onKey(event));
  }

  makeSection() {
    this.scaleNote = h("span.scale");
    this.crumb = h("span.crumb"); // the module that contains the first row in sight
    const search = new SearchBox(this.data, this.tree, (found) =>
      found.node ? this.openNode(found.node) : this.openModule(found.module));
    const heads = h("div.heads", { "aria-hidden": "true" },
      h("span", null, "Forward ↓", this.crumb), h("span", null, "to backward"), h("span", null, "Backward ↑"));
    return h(
      "section.graph",
      { id: "graph", "aria-labelledby": "graph-title" },
      h("h2", { id: "graph-title" }, "Joint graph"),
      h("div.bar", null, search.element, this.makeButtons()),
      h("div.legend", { role: "group", "aria-label": "Legend" },
        FATES.map((fate) => this.legendBox(fate)), tag("chunked", "runs in chunks"), this.scaleNote),
      h("div.split", null, h("div.columns", null, heads, this.scroller), this.panel.element),
    );
  }

  makeButtons() {
    const setOpen = (open) => {
      for (const module of everyModule(this.tree.root)) module.open = open;
    };
    return h("div.buttons", { role: "group", "aria-label": "Open and close modules" },
      button("Close all", () => this.refold(() => setOpen(false))),
      button("Layers", () => this.refold(() => openToLayers(this.tree))),
      button("Open all", () => this.refold(() => setOpen(true))));
  }

  legendBox(fate) {
    const change = (event) => {
      this.shown[fate] = event.target.checked;
      this.rebuild();
      this.draw();
    };
    const box = h("input", { type: "checkbox", change, "aria-label": `Show bands of ${fate} values` });
    box.checked = this.shown[fate];
    return h("label", null, box, tag(fate, fate), h(`span.swatch.${fate}`, { "aria-hidden": "true" }));
  }

  // ---- rows and bands --------------------------------------------------------------------------
  /** Opens or closes rows; the active row stays active, or else the row that now contains it. */
  refold(change) {
    timed("fold", () => {
      const row = this.rows[this.active.row];
      change();
      this.rebuild();
      const module = row?.module;
      const kept = module ? this.rows.find((other) => other.module === module) ?? module.row : null;
      this.active.row = kept ? kept.index : Math.min(this.active.row, this.rows.length - 1);
      this.scrollTo(this.active.row);
      this.draw();
    });
  }

  /** Finds the rows and bands anew, after something was opened, closed, shown or resized. */
  rebuild() {
    this.rows = flatten(this.tree.root);
    this.rowHeight = parseFloat(getComputedStyle(this.section).getPropertyValue("--row")) || 28;
    this.drawn = bandsOf(this.crossings, this.shown, this.rowHeight);
    this.scaleNote.textContent = this.drawn.bands.length
      ? `a band as high as a row is ${bytesText((this.rowHeight - 8) / this.drawn.scale)}`
      : "";
    this.sizer.style.height = `${this.rows.length * this.rowHeight}px`;
    this.scroller.setAttribute("aria-rowcount", this.rows.length);
  }

  /** The rows in sight, and the bands that touch them. */
  draw() {
    const { rows, rowHeight, active } = this;
    const top = this.scroller.scrollTop;
    const height = this.scroller.clientHeight || 600;
    const first = Math.max(0, Math.floor(top / rowHeight) - MARGIN_ROWS);
    const last = Math.min(rows.length, Math.ceil((top + height) / rowHeight) + MARGIN_ROWS);
    this.crumb.textContent = rows[Math.ceil(top / rowHeight)]?.parent.path ?? "";
    this.sizer.replaceChildren(this.svg, ...rows.slice(first, last).map((row) => this.rowElement(row)));
    const id = `row-${active.row}`;
    if (active.row >= first && active.row < last) this.scroller.setAttribute("aria-activedescendant", id);
    else this.scroller.removeAttribute("aria-activedescendant");
    this.drawBands(top, height);
  }

  drawBands(top, height) {
    const { svg, rowHeight } = this;
    const width = svg.clientWidth || 1;
    svg.style.top = `${top}px`;
    svg.style.height = `${height}px`;
    svg.setAttribute("viewBox", `0 ${top} ${width} ${height}`);
    const inSight = this.drawn.bands.filter((band) => {
      const low = Math.min(band.from.index, band.to.index) * rowHeight;
      const high = (Math.max(band.from.index, band.to.index) + 1) * rowHeight;
      return high >= top && low <= top + height;
    });
    inSight.sort((a, b) => b.bytes - a.bytes); // thin ones stay on top
    svg.replaceChildren(patterns(), ...inSight.map((band) => this.bandElement(band, width)));
  }

  bandElement(band, width) {
    const y0 = band.from.index * this.rowHeight + band.fromOffset;
    const y1 = band.to.index * this.rowHeight + band.toOffset;
    const thin = band.thickness < THIN ? ".thin" : "";
    const selected = band === this.selected ? ".selected" : "";
    const title = `${BAND_TITLES[band.fate]}: ${bytesText(band.bytes)}, ${rowText(band.from)} to ${rowText(band.to)}`;
    return s(
      `path.band.${band.fate}${thin}${selected}`,
      {
        d: bandPath(width - 2 * BAND_MARGIN, y0, y1, band.thickness),
        transform: `translate(${BAND_MARGIN} 0)`,
        "stroke-width": Math.max(band.thickness, 1.2),
        click: () => this.select("band", band),
      },
      s("title", null, title),
    );
  }

  rowElement(row) {
    const isActive = row.index === this.active.row;
    const element = h("div.row", {
      id: `row-${row.index}`,
      role: "row",
      "aria-rowindex": row.index + 1,
      "aria-level": row.depth + 1,
      "aria-expanded": row.module ? String(row.module.open) : null,
      "aria-selected": String(isActive),
      "data-index": row.index,
    });
    element.style.top = `${row.index * this.rowHeight}px`;
    element.style.setProperty("--depth", row.depth);
    element.classList.toggle("active", isActive);
    if (row.module) {
      element.classList.add("module");
      element.classList.toggle("selected", row.module === this.selected);
      element.append(...moduleCells(row.module, this.data));
    } else {
      element.append(...["forward", "backward"].map((side) => {
        const cell = nodeCell(row[side], side);
        cell.classList.toggle("active", isActive && this.active.side === side);
        cell.classList.toggle("selected", row[side] !== null && row[side] === this.selected);
        return cell;
      }));
    }
    return element;
  }

  // ---- selection -------------------------------------------------------------------------------
  show(kind, subject) {
    this.selected = subject;
    this.panel.show(kind, subject);
  }

  select(kind, subject) {
    this.show(kind, subject);
    this.draw();
  }

  toggle(module, open = !module.open) {
    this.refold(() => (module.open = open));
  }

  openNode(node) {
    timed("reveal", () => {
      openWithParents(node.home);
      this.rebuild();
      this.show("node", node);
      this.activate(node.row.index, node.backward ? "backward" : "forward", true);
    });
  }

  openModule(module) {
    openWithParents(module.parent);
    this.rebuild();
    this.show("module", module);
    this.activate(this.rows.findIndex((row) => row.module === module), "forward", true);
  }

  /** Opens and selects a node, and scrolls the page to the graph: for links from other sections. */
  reveal(node) {
    this.openNode(node);
    this.section.scrollIntoView({ block: "start" });
  }

  revealRegion(region) {
    const index = this.data.regions.indexOf(region);
    const member = this.data.nodes.find((node) => node.region === index);
    if (member) this.openNode(member);
    this.select("region", region);
    this.section.scrollIntoView({ block: "start" });
  }

  activate(index, side = this.active.side, centred = false) {
    const row = this.rows[index];
    if (!row) return;
    this.active = { row: index, side };
    if (!row.module && !row[side]) this.active.side = side === "forward" ? "backward" : "forward";
    this.scrollTo(index, centred);
    this.draw();
  }

  scrollTo(index, centred = false) {
    const { scroller, rowHeight } = this;
    const at = index * rowHeight;
    const height = scroller.clientHeight;
    if (centred) scroller.scrollTop = at - height / 2;
    else if (at < scroller.scrollTop) scroller.scrollTop = at;
    else if (at + rowHeight > scroller.scrollTop + height) scroller.scrollTop = at + rowHeight - height;
  }

  // ---- events ----------------------------------------------------------------------------------
  onClick(event) {
    const element = event.target.closest(".row");
    if (!element) return;
    const row = this.rows[Number(element.dataset.index)];
    const cell = event.target.closest("[data-node]");
    const side = cell?.classList.contains("backward") ? "backward" : "forward";
    this.active = { row: row.index, side };
    if (cell) this.select("node", this.data.nodes[Number(cell.dataset.node)]);
    else if (row.module) {
      this.show("module", row.module);
      this.toggle(row.module);
    }
  }

  onKey(event) {
    const row = this.rows[this.active.row];
    if (!row || event.ctrlKey || event.metaKey || event.altKey) return;
    const last = this.rows.length - 1;
    const page = Math.max(1, Math.floor(this.scroller.clientHeight / this.rowHeight) - 1);
    const jumps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -last, End: last };
    if (event.key in jumps) {
      this.activate(Math.min(last, Math.max(0, this.active.row + jumps[event.key])));
    } else if (event.key === "ArrowRight") this.goRight(row);
    else if (event.key === "ArrowLeft") this.goLeft(row);
    else if (event.key === "Enter" || event.key === " ") {
      if (row.module) this.select("module", row.module);
      else this.select("node", row[this.active.side]);
    } else return;
    event.preventDefault();
  }

  goRight(row) {
    if (!row.module) this.activate(this.active.row, "backward");
    else if (!row.module.open) this.toggle(row.module, true);
    else this.activate(this.active.row + 1);
  }

  goLeft(row) {
    if (!row.module && this.active.side === "backward" && row.forward) this.activate(this.active.row, "forward");
    else if (row.module?.open) this.toggle(row.module, false);
    else this.activate(this.rows.findIndex((other) => other.module && other.module === row.parent));
  }
}
