// Every kind of tensor: entries, shape, dtype, bytes, and a bar on one linear scale for all of them.

const WHERE_ORDER = ["routed experts", "text", "vision", "projector"];

function kindTable(kinds) {
  const total = kinds.reduce((sum, row) => sum + (row.bytes ?? 0), 0);
  const most = Math.max(1, ...kinds.map((row) => row.bytes ?? 0));
  const places = [...new Set([...WHERE_ORDER, ...kinds.map((row) => row.where)])];
  const ordered = [...kinds].sort((a, b) => (b.bytes ?? -1) - (a.bytes ?? -1));
  const columns = [
    { title: "tensor kind" },
    { title: "dtype" },
    { title: "shape" },
    { title: "entries", numeric: true },
    { title: "bytes", numeric: true },
    { title: "share of bytes" },
    { title: "evidence" },
  ];
  const table = scrolledTable(
    `${plural(kinds.length, "kind")} of tensor; # stands for a layer or an expert`,
    columns,
    places.flatMap((place) => kindGroup(place, ordered.filter((row) => row.where === place), columns.length, total, most)),
    { className: "kind-table" },
  );
  return element("section", { class: "block" }, element("h3", {}, "Every kind of tensor"), filteredList(table));
}

function kindGroup(where, rows, width, total, most) {
  if (!rows.length) return [];
  const bytes = rows.reduce((sum, row) => sum + (row.bytes ?? 0), 0);
  const title = element("th", { colspan: width, scope: "rowgroup" }, element("b", {}, where), `, ${plural(rows.length, "kind")}, ${decimalBytes(bytes)}`);
  return [element("tr", { class: "kind-group" }, title), ...rows.map((row) => kindRow(row, total, most))];
}

// The part of a name that many share stands small above the part that tells it from them.
function kindName(kind) {
  const cut = kind.lastIndexOf("#.") + 2;
  return cut > 1 && cut < kind.length
    ? element("code", {}, element("span", { class: "stem" }, kind.slice(0, cut)), element("wbr"), kind.slice(cut))
    : element("code", {}, kind);
}

function kindRow(row, total, most) {
  const expected = row.expected_entries;
  const share = known(row.bytes) && total ? row.bytes / total : null;
  return element(
    "tr",
    { class: row.agrees === false ? "differing" : null, ...evidence(row.letter, OURS, row.agrees) },
    cell([kindName(row.kind), row.note && element("p", { class: "note" }, row.note)], { header: true }),
    cell(row.dtype || NOT_KNOWN),
    cell(row.dtype ? shapeText(row.shape) : NOT_KNOWN, { className: "nowrap" }),
    cell([count(row.entries), known(expected) && expected !== row.entries && element("p", { class: "note" }, `expected ${count(expected)}`)], { numeric: true }),
    cell(bothBytes(row.bytes), { numeric: true }),
    cell(
      share === null
        ? NOT_KNOWN
        : [element("span", { class: `kind-bar share-${shareGroup(row)}`, set: { width: `${((row.bytes / most) * 100).toFixed(3)}%` }, "aria-hidden": "true" }), element("span", { class: "share-figure" }, percent(share))],
      { className: "bar-cell" },
    ),
    cell([badge(row.letter), " ", verdict(row.agrees)], { className: "standing-cell" }),
  );
}
