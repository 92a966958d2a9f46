// Plans of the same step at other budgets: simulated peak against extra time.

const PARETO = { height: 260, top: 16, bottom: 44, left: 64, right: 24 };

function paretoSection(data) {
  const section = h(
    "section.pareto",
    { id: "pareto", "aria-labelledby": "pareto-title" },
    h("h2", { id: "pareto-title" }, "Peak against time"),
  );
  if (!data.pareto.length) {
    section.append(h("p.absent", null, "Plans at other budgets are not in this report; `mstpass explain --html` adds them."));
    return section;
  }
  const points = [...data.pareto].sort((a, b) => a.extra_time - b.extra_time || a.peak_bytes - b.peak_bytes);
  const plot = s("svg.plot", { role: "group", "aria-label": "Plans by extra time and peak" });
  const note = h("p.caption", { "aria-live": "polite" });
  section.append(plot, note);

  const times = points.map((point) => point.extra_time);
  const low = Math.min(0, ...times);
  const high = Math.max(...times, low + 0.01);
  const most = Math.max(...points.map((point) => point.peak_bytes), 1) * 1.08;

  function describe(point) {
    note.textContent =
      `${point.label}: peak ${bytesText(point.peak_bytes)}, extra time ${percentText(point.extra_time)}` +
      (point.chosen ? " (this plan)" : "");
  }

  function draw() {
    const width = Math.max(300, plot.clientWidth || 700);
    const { height, top, bottom, left, right } = PARETO;
    const x = (time) => left + ((time - low) / (high - low)) * (width - left - right);
    const y = (bytes) => height - bottom - (bytes / most) * (height - top - bottom);
    plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const path = points.map((point) => `${x(point.extra_time)} ${y(point.peak_bytes)}`).join("L");
    plot.replaceChildren(
      ...ticksOf(most).map((bytes) =>
        s("g.tick", null,
          s("line", { x1: left, x2: width - right, y1: y(bytes), y2: y(bytes) }),
          s("text", { x: left - 8, y: y(bytes) + 4, "text-anchor": "end" }, tickText(bytesText(bytes))))),
      ...roundSteps(low, high).map((time) =>
        s("text.phase", { x: x(time), y: height - bottom + 18, "text-anchor": "middle" }, tickText(percentText(time)))),
      s("text.phase", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle" }, "extra time, estimated"),
      s("path.curve", { d: `M${path}` }),
      ...points.map((point) => mark(point, x(point.extra_time), y(point.peak_bytes), width)),
    );
  }

  function mark(point, px, py, width) {
    const flip = px > width - 160;
    const shape = point.chosen
      ? s("path", { d: `M${px} ${py - 8}l8 8l-8 8l-8 -8z` })
      : s("circle", { cx: px, cy: py, r: 5 });
    const label = point.chosen
      ? s("text", { x: px + (flip ? -14 : 14), y: py - 10, "text-anchor": flip ? "end" : "start" },
          `this plan, ${bytesText(point.peak_bytes)}`)
      : null;
    const about = () => describe(point);
    return s(`g.plan${point.chosen ? ".chosen" : ""}`,
      { tabindex: 0, role: "img", "aria-label": `${point.label}: ${bytesText(point.peak_bytes)}, ${percentText(point.extra_time)}`,
        focus: about, pointerenter: about },
      s("title", null, `${point.label}: ${bytesText(point.peak_bytes)}, ${percentText(point.extra_time)}`),
      s("circle.hit", { cx: px, cy: py, r: 14 }), shape, label);
  }

  describe(points.find((point) => point.chosen) ?? points[0]);
  new ResizeObserver(draw).observe(plot);
  section.append(
    sortableTable("Plans", points, [
      { name: "plan", value: (point) => point.label + (point.chosen ? " (this plan)" : "") },
      { name: "peak", value: (point) => point.peak_bytes, text: bytesText, number: true },
      { name: "extra time", value: (point) => point.extra_time, text: percentText, number: true },
    ]),
  );
  return section;
}
