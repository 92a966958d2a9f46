// Tables that can be sorted and copied.

const ROWS = 100; // rows made at once

function tableSections(data, graph) {
  const linked = (node, text) => (graph && node ? button(text, () => graph.reveal(node), { class: "link" }) : text);
  const bytes = { text: bytesText, number: true };
  const anyOnHost = data.copies.length > 0;
  return [
    tableSection("regions", "What runs in chunks", data.regions, "Nothing runs in chunks.", [
      {
        name: "kind",
        value: (region) => region.kind,
        cell: (region) => (graph ? button(region.kind, () => graph.revealRegion(region), { class: "link" }) : region.kind),
      },
      { name: "mode", value: (region) => region.mode },
      { name: "chunks", value: (region) => region.num_chunks, number: true },
      { name: "tokens per chunk", value: (region) => region.chunk_tokens, number: true },
      { name: "tokens", value: (region) => region.num_tokens, number: true },
      { name: "large values before", value: (region) => region.bytes_before, ...bytes },
      { name: "in chunks", value: (region) => region.bytes_after, ...bytes },
      { name: "source", value: (region) => region.source },
      { name: "note", value: (region) => region.note },
    ]),
    rejectionSection(data, [
      { name: "part", value: (rejection) => rejection.source },
      { name: "node", value: (rejection) => rejection.node, cell: (rejection) => linked(data.byName.get(rejection.node), rejection.node) },
      { name: "stage", value: (rejection) => rejection.stage },
      { name: "bytes", value: (rejection) => rejection.bytes, ...bytes },
      { name: "why", value: (rejection) => rejection.reason, wide: true },
      { name: "what to change", value: (rejection) => rejection.fix ?? "", wide: true },
    ]),
    tableSection("saved", "Saved for backward", savedRows(data), "Nothing is saved for backward.", [
      { name: "value", value: (saved) => saved.name, cell: (saved) => linked(saved.node, saved.name) },
      { name: "bytes", value: (saved) => saved.bytes, ...bytes },
      { name: "waits", value: (saved) => (saved.onHost ? "on the host" : anyOnHost ? "on the device" : "") },
      { name: "shape", value: (saved) => saved.shape },
      { name: "module", value: (saved) => saved.module },
      { name: "source", value: (saved) => saved.source },
    ]),
    tableSection("reconstructed", "Reconstructed", data.reconstructed, "Nothing is reconstructed.", [
      { name: "value", value: (item) => item.node, cell: (item) => linked(ofFate(data, item.node, "reconstructed"), item.node) },
      { name: "from", value: (item) => item.sources.join(", ") },
      { name: "rule", value: (item) => item.rule },
      { name: "grade", value: (item) => item.grade },
      { name: "saved bytes avoided", value: (item) => item.bytes, ...bytes },
      { name: "error bound", value: (item) => item.bounds.join("; ") },
      { name: "source", value: (item) => item.source },
    ]),
  ];
}

/** A table of what the user can change; all that asks for nothing is one line, which opens. */
function rejectionSection({ rejections, asked, unasked }, columns) {
  const title = "What does not run in chunks";
  const absent = rejections.length ? "There is nothing to change." : "Every large part runs in chunks.";
  const section = tableSection("rejections", title, asked, absent, columns);
  if (unasked.length) {
    const most = unasked.reduce((bytes, rejection) => Math.max(bytes, rejection.bytes), 0);
    const size = most ? ` of up to ${bytesText(most)}` : "";
    section.append(
      h("details.unasked", null,
        h("summary", null, `Stays whole, with nothing to change: ${countText(unasked.length, "part")}${size}`),
        sortableTable(`${title}, with nothing to change`, unasked, columns)),
    );
  }
  return section;
}

/** The saved nodes of the joint graph; without details, the saved values by their names in the plan. */
function savedRows(data) {
  const nodes = data.nodes.filter((node) => node.fate === "saved");
  const rows = nodes.length
    ? nodes.map((node) => ({ ...node, node, shape: shapeText(node) }))
    : data.saved.map((value) => (
        { ...value, node: null, name: value.node, onHost: value.on_host, shape: "", module: "" }));
  return rows.sort((a, b) => b.bytes - a.bytes);
}

function ofFate(data, name, fate) {
  const node = data.byName.get(name);
  return node?.fate === fate ? node : null;
}

function tableSection(id, title, rows, absent, columns) {
  const heading = h("h2", { id: `${id}-title` }, title, h("span.count", null, ` ${rows.length}`));
  return h(
    "section.table",
    { id, "aria-labelledby": `${id}-title` },
    heading,
    rows.length ? sortableTable(title, rows, columns) : h("p.absent", null, absent),
  );
}

/** Columns: {name, value(row), text(value), cell(row), number}. A column of empty texts is left out. */
function sortableTable(label, rows, columns) {
  columns = columns.filter((column) => column.number || rows.some((row) => column.value(row) !== ""));
  let shown = rows;
  let order = { column: null, down: true };
  let count = ROWS;
  const body = h("tbody");
  const more = button("", () => {
    count = Infinity;
    draw();
  }, { class: "quiet" });

  function textOf(column, row) {
    const value = column.value(row);
    return column.text ? column.text(value) : String(value);
  }

  function draw() {
    body.replaceChildren(
      ...shown.slice(0, count).map((row) =>
        h("tr", null, columns.map((column) =>
          h(column.number ? "td.number" : column.wide ? "td.wide" : "td", null,
            column.cell ? column.cell(row) : textOf(column, row)))),
      ),
    );
    more.hidden = shown.length <= count;
    more.textContent = `Show ${countText(shown.length - count, "more", "more")}`;
  }

  function sort(column) {
    const down = order.column === column ? !order.down : Boolean(column.number);
    order = { column, down };
    const sign = down ? -1 : 1;
    shown = [...rows].sort((a, b) => {
      const [one, other] = [column.value(a), column.value(b)];
      return sign * (column.number ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
    });
    heads.forEach((head, i) => {
      if (columns[i] === column) head.setAttribute("aria-sort", down ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    draw();
  }

  const heads = columns.map((column) =>
    h(column.number ? "th.number" : "th", { scope: "col" }, button(column.name, () => sort(column), { class: "sort" })),
  );
  const copyButton = button("Copy", (event) => {
    const lines = [columns.map((column) => column.name), ...shown.map((row) => columns.map((column) => textOf(column, row)))];
    copy(lines.map((cells) => cells.map(cellText).join("\t")).join("\n"), event.target);
  }, { "aria-label": `Copy the table: ${label}` });
  draw();
  return h("div.holder", null,
    h("div.scroll", { tabindex: 0, role: "region", "aria-label": label },
      h("table", null, h("thead", null, h("tr", null, heads)), body)),
    h("div.under", null, more, copyButton));
}

/** One cell of tab-separated text. */
function cellText(text) {
  return text.replace(/[\t\r\n]+/g, " ");
}
