// Search of the graph, as a combobox: modules first, then nodes, by name, op, module or source.

const FOUND = 40; // results on show

/** `go` is called with {module} or {node}. */
function searchBox(data, tree, go) {
  const modules = [...tree.byPath.values()].filter((module) => module.path);
  const texts = data.nodes.map((node) =>
    `${node.name}\n${node.op}\n${node.module}\n${node.source}`.toLowerCase(),
  );
  let results = [];
  let active = -1;

  const list = h("ul", { id: "found", role: "listbox", "aria-label": "Found", hidden: true });
  const status = h("span.status", { role: "status" });
  const input = h("input", {
    type: "search",
    placeholder: "Search name, op, module, source",
    role: "combobox",
    "aria-label": "Search the graph",
    "aria-expanded": "false",
    "aria-controls": "found",
    "aria-autocomplete": "list",
    autocomplete: "off",
    spellcheck: "false",
  });

  function search() {
    const wanted = input.value.trim().toLowerCase();
    results = [];
    let count = 0;
    if (wanted) {
      for (const module of modules) {
        if (module.path.toLowerCase().includes(wanted)) results.push({ module });
      }
      for (const node of data.nodes) if (texts[node.index].includes(wanted)) results.push({ node });
      count = results.length;
    }
    active = count ? 0 : -1;
    status.textContent = wanted ? `${count.toLocaleString("en")} found` : "";
    results = results.slice(0, FOUND);
    list.replaceChildren(...results.map(option));
    if (count > FOUND) list.append(h("li.more", { role: "presentation" }, `${count - FOUND} more: type more letters to see them`));
    show(wanted !== "" && count > 0);
    mark();
  }

  function option({ module, node }, index) {
    const text = module
      ? [h("span.title", null, module.path), h("span.quiet", null, "module")]
      : [
          h("span.title", null, node.name),
          h("span.quiet", null, [node.op, node.backward ? "backward" : "forward", node.module, node.source]
            .filter(Boolean).join(" · ")),
        ];
    return h("li", { id: `found-${index}`, role: "option", mousedown: (event) => {
      event.preventDefault();
      choose(index);
    } }, text);
  }

  function show(open) {
    list.hidden = !open;
    input.setAttribute("aria-expanded", String(open));
    if (!open) input.removeAttribute("aria-activedescendant");
  }

  function mark() {
    [...list.querySelectorAll("[role=option]")].forEach((element, index) => {
      element.setAttribute("aria-selected", String(index === active));
      if (index !== active) return;
      input.setAttribute("aria-activedescendant", element.id);
      element.scrollIntoView({ block: "nearest" });
    });
  }

  function choose(index) {
    if (!results[index]) return;
    show(false);
    go(results[index]);
  }

  input.addEventListener("input", () => timed("search", search));
  input.addEventListener("focus", () => show(results.length > 0));
  input.addEventListener("blur", () => show(false));
  input.addEventListener("keydown", (event) => {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (step && results.length) {
      active = (active + step + results.length) % results.length;
      show(true);
      mark();
    } else if (event.key === "Enter") choose(active);
    else if (event.key === "Escape") show(false);
    else return;
    event.preventDefault();
  });
  return h("div.search", { role: "search" }, input, status, list);
}
