// Where the bytes are: all of them in one bar, and what is not a routed expert enlarged below it.

const SHARE_GROUPS = [
  ["experts", "routed experts", (row) => row.where === "routed experts"],
  ["vision", "vision and projector", (row) => row.where === "vision" || row.where === "projector"],
  ["embedding", "embedding and head", (row) => /(^|\.)(embed_tokens|lm_head)\./.test(row.kind)],
  ["attention", "attention", (row) => /\.self_attn\./.test(row.kind)],
  ["shared", "shared experts", (row) => /\.shared_experts\./.test(row.kind)],
  ["latent", "router and latent projections", (row) => /\.block_sparse_moe\./.test(row.kind)],
  ["mlp", "dense MLP", (row) => /\.mlp\./.test(row.kind)],
  ["rest", "norms, AttnRes and the rest", () => true],
];

function shareGroup(row) {
  return SHARE_GROUPS.find(([, , test]) => test(row))[0];
}

function sharesOf(kinds) {
  const groups = SHARE_GROUPS.map(([id, title]) => ({ id, title, bytes: 0, entries: 0, unknown: 0, letters: new Set() }));
  for (const row of kinds) {
    const group = groups.find(({ id }) => id === shareGroup(row));
    group.entries += row.entries;
    group.letters.add(row.letter);
    if (known(row.bytes)) group.bytes += row.bytes;
    else group.unknown += row.entries;
  }
  return groups.filter((group) => group.entries > 0);
}

function shareBar(groups, total, label) {
  return element(
    "div",
    { class: "share-bar", role: "img", "aria-label": label },
    groups.map((group) =>
      element("span", { class: `share share-${group.id}`, set: { "flex-grow": String(group.bytes / total) } }),
    ),
  );
}

function tensorShares(kinds) {
  const groups = sharesOf(kinds);
  const total = groups.reduce((sum, group) => sum + group.bytes, 0);
  if (!total) return element("p", { class: "empty" }, "No kind of tensor has a known size.");
  const experts = groups.find((group) => group.id === "experts");
  const others = groups.filter((group) => group.id !== "experts").sort((a, b) => b.bytes - a.bytes);
  const rest = others.reduce((sum, group) => sum + group.bytes, 0);
  const unknown = groups.reduce((sum, group) => sum + group.unknown, 0);
  return element(
    "section",
    { class: "block shares", "aria-label": "Shares of the bytes" },
    experts && element(
      "p",
      { class: "headline" },
      element("b", { class: "headline-figure" }, percent(experts.bytes / total)),
      element("span", {}, ` of the bytes are routed experts: ${decimalBytes(experts.bytes)} in ${count(experts.entries)} tensors. `, badge("D"), " ", owner(OURS)),
    ),
    experts && shareBar([experts, { id: "others", bytes: rest }], total, `Routed experts ${percent(experts.bytes / total)}, all else ${percent(rest / total)}`),
    experts && rest > 0 && magnifier(experts.bytes / total),
    rest > 0 && element("p", { class: "enlarged" }, `${experts ? "All else, enlarged" : "All of it"}: ${decimalBytes(rest)}, ${percent(rest / total)}`),
    rest > 0 && shareBar(others, rest, others.map((group) => `${group.title} ${percent(group.bytes / total)}`).join(", ")),
    shareTable([experts, ...others].filter(Boolean), total),
    unknown > 0 && element("p", { class: "note" }, `${plural(unknown, "tensor")} of unknown size ${unknown === 1 ? "is" : "are"} in no figure here.`),
  );
}

// The sliver at the end of the bar above, opened to the width of the bar below.
function magnifier(share) {
  const left = (share * 1000).toFixed(1);
  return drawing(
    "svg",
    { viewBox: "0 0 1000 40", preserveAspectRatio: "none", class: "magnifier", "aria-hidden": "true" },
    drawing("path", { d: `M${left} 0H1000V40H0Z` }),
  );
}

function shareTable(groups, total) {
  const rows = groups.map((group) =>
    element(
      "tr",
      {},
      cell([element("span", { class: `share-swatch share-${group.id}`, "aria-hidden": "true" }), group.title], { header: true }),
      cell(count(group.entries), { numeric: true }),
      cell(bothBytes(group.bytes), { numeric: true }),
      cell(percent(group.bytes / total), { numeric: true }),
    ),
  );
  const columns = [{ title: "part" }, { title: "tensors", numeric: true }, { title: "bytes", numeric: true }, { title: "share", numeric: true }];
  return scrolledTable("Parts of the checkpoint by bytes", columns, rows, { className: "share-table", quiet: true });
}
