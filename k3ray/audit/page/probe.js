// The router stress probe: made-up inputs, and how unevenly the experts are chosen with and without the bias.

function probeSection(probe) {
  if (!probe) {
    return element("section", { class: "block" }, element("h3", {}, "Synthetic router probe"), element("p", { class: "empty" }, "Not run: it needs router weights, which this source does not hold or this audit did not fetch."));
  }
  const most = Math.max(probe.chance_cv, ...probe.layers.flatMap((row) => [row.with_bias.cv, row.without_bias.cv]), 1e-9) * 1.08;
  const columns = [
    { title: "layer", numeric: true },
    { title: "load CV: \u25cf with bias, \u25cb without" },
    { title: "CV with", numeric: true },
    { title: "CV without", numeric: true },
    { title: "Gini with", numeric: true },
    { title: "Gini without", numeric: true },
    { title: "experts never chosen, with", numeric: true },
    { title: "without", numeric: true },
    { title: "overlap", numeric: true },
    { title: "experts, top-k", numeric: true },
  ];
  const table = scrolledTable("Synthetic router probe by layer", columns, probe.layers.map((row) => probeRow(row, probe, most)), { className: "probe-table", quiet: true });
  return element(
    "section",
    { class: "block probe", ...evidence(probe.kind) },
    element("h3", {}, "Synthetic router probe"),
    element("div", { class: "standing" }, badge(probe.kind), owner(OURS)),
    element(
      "p",
      { class: "lead" },
      `${plural(probe.inputs, "made-up input")}, seed ${probe.seed}, every direction alike, RMS ${real(probe.rms)}. No text looks like this: the probe strains the router and says nothing about real traffic. A router that chose by chance would show a load CV of ${real(probe.chance_cv)} (the dotted line).`,
    ),
    table,
  );
}

function probeRow(row, probe, most) {
  const at = (value) => ((value / most) * 196 + 2).toFixed(1);
  const figure = (value) => cell(known(value) ? real(value) : NOT_KNOWN, { numeric: true });
  const picture = drawing(
    "svg",
    { viewBox: "0 0 200 20", class: "dumbbell", role: "img", "aria-label": `load CV ${real(row.with_bias.cv)} with bias, ${real(row.without_bias.cv)} without` },
    drawing("path", { d: `M${at(probe.chance_cv)} 0V20`, class: "zero" }),
    drawing("path", { d: `M${at(row.with_bias.cv)} 10H${at(row.without_bias.cv)}`, class: "whisker" }),
    drawing("circle", { cx: at(row.without_bias.cv), cy: 10, r: 4.5, class: "without" }),
    drawing("circle", { cx: at(row.with_bias.cv), cy: 10, r: 4.5, class: "with" }),
  );
  return element(
    "tr",
    {},
    cell(String(row.layer), { numeric: true, header: true }),
    cell(picture),
    [row.with_bias.cv, row.without_bias.cv, row.with_bias.gini, row.without_bias.gini, row.with_bias.without_load, row.without_bias.without_load].map(figure),
    cell(percent(row.overlap, 1), { numeric: true }),
    cell(`${count(row.experts)}, ${count(row.top_k)}`, { numeric: true, className: "nowrap" }),
  );
}
