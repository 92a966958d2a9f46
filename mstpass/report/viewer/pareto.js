// Plans of the same step at other budgets: simulated peak against extra time.

const PARETO = { height: 260, top: 16, bottom: 44, left: 64, right: 24 };

function paretoSection(data) {
  const section = h(
    "section.pareto",
    { id: "pareto", "aria-labelledby": "pareto-title" },
    h("h2", { id: "pareto-title" }, "Peak against time"),
  );
  if (!data.pareto.length) {
    const text = "Plans at other budgets are not in this report. The command mstpass explain --html adds them.";
    section.append(h("p.absent", null, text));
    return section;
  }
  const points = [...data.pareto].sort((a, b) => a.extra_time - b.extra_time || a.peak_bytes - b.peak_bytes);
  const plot = s("svg.plot", { role: "group", "aria-label": "Plans by extra time and peak" });
  const note = h("p.caption", { "aria-live": "polite" });
  const describe = (point) => (note.textContent = pointText(point) + (point.chosen ? " (this plan)" : ""));
  describe(points.find((point) => point.chosen) ?? points[0]);
  new ResizeObserver(() => drawPareto(plot, points, describe)).observe(plot);
  section.append(plot, note, sortableTable("Plans", points, [
    { name: "plan", value: (point) => point.label + (point.chosen ? " (this plan)" : "") },
    { name: "peak", value: (point) => point.peak_bytes, text: bytesText, number: true },
    { name: "extra time", value: (point) => point.extra_time, text: percentText, number: true },
  ]));
  return section;
}

function pointText(point) {
  return `${point.label}: peak ${bytesText(point.peak_bytes)}, extra time ${percentText(point.extra_time)}`;
}

function drawPareto(plot, points, describe) {
  const width = Math.max(300, plot.clientWidth || 700);
  const { height, top, bottom, left, right } = PARETO;
  const times = points.map((point) => point.extra_time);
  const low = Math.min(0, ...times);
  const high = Math.max(...times, low + 0.01);
  const most = Math.max(...points.map((point) => point.peak_bytes), 1) * 1.08;
  const x = (time) => left + ((time - low) / (high - low)) * (width - left - right);
  const y = (bytes) => height - bottom - (bytes / most) * (height - top - bottom);
  const label = (text, px, py) => s("text.phase", { x: px, y: py, "text-anchor": "middle" }, text);
  const path = points.map((point) => `${x(point.extra_time)} ${y(point.peak_bytes)}`).join("L");
  plot.setAttribute("viewBox", `0 0 ${width} ${height}`);
  plot.replaceChildren(
    ...byteTicks(most, y, left, width - right),
    ...roundSteps(low, high).map((time) => label(tickText(percentText(time)), x(time), height - bottom + 18)),
    label("estimated extra time", (left + width - right) / 2, height - 6),
    s("path.curve", { d: `M${path}` }),
    ...points.map((point) => planMark(point, x(point.extra_time), y(point.peak_bytes), width, describe)),
  );
}

function planMark(point, px, py, width, describe) {
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
    { tabindex: 0, role: "img", "aria-label": pointText(point), focus: about, pointerenter: about },
    s("title", null, pointText(point)),
    s("circle.hit", { cx: px, cy: py, r: 14 }), shape, label);
}
