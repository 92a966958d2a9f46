// Elements, numbers and glyphs. Text always goes in as text: no string here is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

/** h("td.number", {title: "..."}, "12", child): attributes that are functions listen. */
function h(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElement(name), classes, attributes, children);
}

function s(tag, attributes, ...children) {
  const [name, ...classes] = tag.split(".");
  return fill(document.createElementNS(SVG, name), classes, attributes, children);
}

function fill(element, classes, attributes, children) {
  if (classes.length) element.setAttribute("class", classes.join(" "));
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") element.addEventListener(key, value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

function bytesText(bytes) {
  const sign = bytes < 0 ? "−" : "";
  let size = Math.abs(bytes);
  if (size < 1024) return `${sign}${size} B`;
  for (const unit of ["KiB", "MiB", "GiB", "TiB"]) {
    size /= 1024;
    if (size < 1024 || unit === "TiB") return `${sign}${size.toFixed(1)} ${unit}`;
  }
}

/** 0.123 as "12.3 %", which no line break parts. */
function percentText(fraction) {
  const percent = Math.abs(fraction * 100).toFixed(1);
  return `${fraction < 0 && percent !== "0.0" ? "−" : ""}${percent}\u00a0%`;
}

function countText(count, one, many) {
  return `${count.toLocaleString("en")} ${count === 1 ? one : many ?? one + "s"}`;
}

// Fates differ without colour too: each has a shape of its own, and the word stands beside it.
const GLYPHS = {
  saved: "M2 2h10v10H2z",
  recomputed: "M11.5 5.2A5 5 0 1 0 12 8M12 2v3.4H8.6",
  reconstructed: "M7 1.2 12.8 7 7 12.8 1.2 7z",
  chunked: "M2 2.2h10v2.4H2zM2 5.8h10v2.4H2zM2 9.4h10v2.4H2z",
};

function glyph(kind) {
  return s(
    `svg.glyph.${kind}`,
    { viewBox: "0 0 14 14", "aria-hidden": "true" },
    s("path", { d: GLYPHS[kind] }),
  );
}

/** A label that names a fate or a region: glyph, word, colour. */
function tag(kind, ...text) {
  return h(`span.tag.${kind}`, null, glyph(kind), h("span", null, ...text));
}

function button(text, onclick, attributes) {
  return h("button", { type: "button", click: onclick, ...attributes }, text);
}

/** Puts text on the clipboard; says so in the button that was pressed. */
async function copy(text, pressed) {
  const label = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    const area = h("textarea", { "aria-hidden": "true", class: "offscreen" });
    area.value = text;
    document.body.append(area);
    area.select();
    pressed.textContent = document.execCommand("copy") ? "Copied" : "Not allowed here";
    area.remove();
  }
  setTimeout(() => (pressed.textContent = label), 1500);
}

/** Runs `work` and keeps how long it took as a performance measure. */
function timed(name, work) {
  const start = performance.now();
  const result = work();
  performance.measure(`mstpass:${name}`, { start, end: performance.now() });
  return result;
}
