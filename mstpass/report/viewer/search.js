// Search of the graph, as a combobox: modules first, then nodes, by name, op, module or source.

const FOUND = 40; // results on show

class SearchBox {
  /** `go` is called with {module} or {node}. */
  constructor(data, tree, go) {
    this.nodes = data.nodes;
    this.modules = [...tree.byPath.values()].filter((module) => module.path);
    this.texts = data.nodes.map((node) =>
      `${node.name}\n${node.op}\n${node.module}\n${node.source}`.toLowerCase());
    this.go = go;
    this.results = [];
    this.active = -1;
    this.list = h("ul", { id: "found", role: "listbox", "aria-label": "Found", hidden: true });
    this.status = h("span.status", { role: "status" });
    this.input = h("input", {
      type: "search",
      placeholder: "Search name, op, module, source",
      role: "combobox",
      "aria-label": "Search the graph",
      "aria-expanded": "false",
      "aria-controls": "found",
      "aria-autocomplete": "list",
      autocomplete: "off",
      spellcheck: "false",
      input: () => timed("search", () => this.search()),
      focus: () => this.show(this.results.length > 0),
      blur: () => this.show(false),
      keydown: (event) => this.onKey(event),
    });
    this.element = h("div.search", { role: "search" }, this.input, this.status, this.list);
  }

  search() {
    const wanted = this.input.value.trim().toLowerCase();
    const found = [];
    if (wanted) {
      for (const module of this.modules) {
        if (module.path.toLowerCase().includes(wanted)) found.push({ module });
      }
      for (const node of this.nodes) if (this.texts[node.index].includes(wanted)) found.push({ node });
    }
    const count = found.length;
    this.active = count ? 0 : -1;
    this.status.textContent = wanted ? `${count.toLocaleString("en")} found` : "";
    this.results = found.slice(0, FOUND);
    this.list.replaceChildren(...this.results.map((result, index) => this.option(result, index)));
    if (count > FOUND) {
      const text = `${count - FOUND} more: type more letters to see them`;
      this.list.append(h("li.more", { role: "presentation" }, text));
    }
    this.show(wanted !== "" && count > 0);
    this.mark();
  }

  option({ module, node }, index) {
    const title = module ? module.path : node.name;
    const facts = module
      ? ["module"]
      : [node.op, node.backward ? "backward" : "forward", node.module, node.source];
    const mousedown = (event) => {
      event.preventDefault();
      this.choose(index);
    };
    return h("li", { id: `found-${index}`, role: "option", mousedown },
      h("span.title", null, title), h("span.quiet", null, facts.filter(Boolean).join(" · ")));
  }

  show(open) {
    this.list.hidden = !open;
    this.input.setAttribute("aria-expanded", String(open));
    if (!open) this.input.removeAttribute("aria-activedescendant");
  }

  /** Marks the active result and scrolls to it. */
  mark() {
    [...this.list.querySelectorAll("[role=option]")].forEach((element, index) => {
      element.setAttribute("aria-selected", String(index === this.active));
      if (index !== this.active) return;
      this.input.setAttribute("aria-activedescendant", element.id);
      element.scrollIntoView({ block: "nearest" });
    });
  }

  choose(index) {
    if (!this.results[index]) return;
    this.show(false);
    this.go(this.results[index]);
  }

  onKey(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    const count = this.results.length;
    if (step && count) {
      this.active = (this.active + step + count) % count;
      this.show(true);
      this.mark();
    } else if (event.key === "Enter") this.choose(this.active);
    else if (event.key === "Escape") this.show(false);
    else return;
    event.preventDefault();
  }
}
