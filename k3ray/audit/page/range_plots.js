// Statistics of small tensors as ranges: minimum, 10th percentile, median, 90th percentile, maximum.

const POINTS = [["minimum", "min"], ["p10", "p10"], ["median", "median"], ["p90", "p90"], ["maximum", "max"]];

// Rows of the same parameter share one axis, so that layers compare, and ours with those recorded elsewhere.
function statisticGroups(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = row.subject.replace(/^[^:]*: |,.*$/g, "").replace(/\b(layer|shard|block) \d+\b ?/gi, "").trim() || row.subject;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  return [...groups];
}

function axisOf(rows) {
  const values = rows.flatMap((row) => POINTS.map(([name]) => row[name])).filter(known);
  if (!values.length) return null;
  const low = Math.min(...values);
  const high = Math.max(...values);
  const room = (high - low || Math.abs(high) || 1) * 0.04;
  return { low: low - room, high: high + room, at: (value) => ((value - low + room) / (high - low + 2 * room)) * 1000 };
}

function rangePlot(row, axis) {
  const at = (name) => axis.at(row[name]).toFixed(1);
  const has = (...names) => names.every((name) => known(row[name]));
  const label = POINTS.filter(([name]) => has(name)).map(([name, short]) => `${short} ${real(row[name])}`).join(", ");
  const line = (x, top, bottom, className) => drawing("path", { d: `M${x} ${top}V${bottom}`, class: className });
  return drawing(
    "svg",
    { viewBox: "0 0 1000 30", preserveAspectRatio: "none", class: "range", role: "img", "aria-label": label },
    axis.low < 0 && axis.high > 0 && line(axis.at(0).toFixed(1), 0, 30, "zero"),
    has("minimum", "maximum") && drawing("path", { d: `M${at("minimum")} 15H${at("maximum")}`, class: "whisker" }),
    has("minimum") && line(at("minimum"), 9, 21, "whisker"),
    has("maximum") && line(at("maximum"), 9, 21, "whisker"),
    has("p10", "p90") && drawing("rect", { x: at("p10"), width: Math.max(1, at("p90") - at("p10")).toFixed(1), y: 6, height: 18, class: "middle" }),
    has("median") && line(at("median"), 2, 28, "median"),
  );
}

function statisticRow(row, axis) {
  const missing = POINTS.filter(([name]) => !known(row[name])).map(([, short]) => short);
  const extra = Object.entries(row.extra);
  return element(
    "li",
    { class: `statistic ${row.by === OURS ? "ours" : "others"}`, ...evidence(row.letter, row.by) },
    element(
      "div",
      { class: "statistic-name" },
      element("b", {}, row.subject),
      element("div", { class: "standing" }, badge(row.letter), owner(row.by)),
    ),
    axis ? rangePlot(row, axis) : element("p", { class: "empty" }, "no figures"),
    element(
      "dl",
      { class: "points" },
      POINTS.filter(([name]) => known(row[name])).map(([name, short]) => element("div", {}, element("dt", {}, short), element("dd", {}, real(row[name])))),
    ),
    element(
      "p",
      { class: "source" },
      element("code", {}, row.tensor), `, ${plural(row.count, "value")}`,
      missing.length > 0 && `; ${missing.join(", ")} not recorded`,
      extra.map(([name, value]) => [`; ${name} `, element("b", {}, real(value))]),
      row.source && [". Source: ", row.source],
    ),
  );
}

function rangePlots(rows) {
  if (!rows.length) return element("section", { class: "block" }, element("h3", {}, "Statistics of small tensors"), element("p", { class: "empty" }, "The snapshot holds no statistics."));
  return element(
    "section",
    { class: "block" },
    element("h3", {}, "Statistics of small tensors"),
    element(
      "p",
      { class: "lead range-key" },
      "Line: minimum to maximum. Box: 10th to 90th percentile. Upright: median. Dotted: zero. Rows of one parameter share an axis. Dashed and hollow: recorded by others.",
    ),
    statisticGroups(rows).map(([name, group]) => {
      const axis = axisOf(group);
      return element(
        "section",
        { class: "statistic-group" },
        element("h4", {}, name),
        filteredList(element("ul", { class: "statistics" }, group.map((row) => statisticRow(row, axis)))),
      );
    }),
  );
}
