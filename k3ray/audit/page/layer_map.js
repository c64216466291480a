// The layer map: every layer a cell, a row for each AttnRes block, in the order in which a token passes.

function layerBlocks(layers) {
  const blocks = new Map();
  for (const row of layers) {
    if (!blocks.has(row.attnres_block)) blocks.set(row.attnres_block, []);
    blocks.get(row.attnres_block).push(row);
  }
  return [...blocks].sort(([a], [b]) => a - b);
}

function layerCell(row) {
  return element(
    "button",
    {
      type: "button",
      class: `layer ${row.attention} ${row.feed_forward}`,
      tabindex: -1,
      "aria-pressed": "false",
      "aria-label": `Layer ${row.layer}, ${row.attention}, ${row.feed_forward}, ${EVIDENCE[row.letter].word}`,
      "data-layer": row.layer,
      ...evidence(row.letter, OURS, null, "dim"),
    },
    element("span", { class: "layer-number" }, row.layer),
    element("span", { class: "layer-attention" }, row.attention),
    element("span", { class: "layer-feed" }),
  );
}

// How many finished vectors the layers of a block mix with their running sum, as filled squares.
function bankPicture(filledSquares, squares) {
  return element(
    "span",
    { class: "bank", role: "img", "aria-label": `bank of ${plural(filledSquares, "vector")}` },
    Array.from({ length: squares }, (_, index) => element("i", { class: index < filledSquares ? "full" : "" })),
  );
}

function blockRow([block, rows], index, blocks) {
  const numbers = ranges(rows.map((row) => row.layer));
  const joins = index === 0 ? "the embedding joins the bank" : `the sum of block ${blocks[index - 1][0]} joins the bank`;
  return element(
    "div",
    { class: "attnres-block" },
    element(
      "p",
      { class: "block-label", id: `block-${block}` },
      element("b", {}, `Block ${block}`),
      element("span", {}, `${rows.length === 1 ? "layer" : "layers"} ${numbers}`),
      bankPicture(index + 1, blocks.length),
      element("span", { class: "joins" }, joins),
    ),
    element("div", { class: "cells", role: "group", "aria-labelledby": `block-${block}` }, rows.map(layerCell)),
  );
}

function layerMap(layers) {
  const blocks = layerBlocks(layers);
  const columns = Math.min(12, Math.max(1, ...blocks.map(([, rows]) => rows.length)));
  const details = element("aside", { class: "layer-details", "aria-live": "polite", "aria-label": "The chosen layer" });
  const summary = element("button", { type: "button", class: "layer-summary", on: { click: () => details.scrollIntoView({ block: "start" }) } });
  const map = element(
    "div",
    { class: "layer-map", role: "group", "aria-label": "Layers by AttnRes block; arrow keys move", set: { "--columns": columns } },
    element("p", { class: "map-end" }, element("b", {}, "In"), " token embedding"),
    blocks.map((block, index) => blockRow(block, index, blocks)),
    element("p", { class: "map-end" }, element("b", {}, "Out"), " the output mix over the bank, final norm, head"),
  );
  const cells = [...map.querySelectorAll(".layer")];
  const choose = (index, focus) => {
    cells.forEach((other, position) => {
      other.setAttribute("aria-pressed", String(position === index));
      other.tabIndex = position === index ? 0 : -1;
    });
    details.replaceChildren(...layerDetails(layers, index, blocks));
    summary.replaceChildren(...layerSummary(layers[index]));
    if (focus) cells[index].focus();
  };
  map.addEventListener("click", (event) => {
    const index = cells.indexOf(event.target.closest(".layer"));
    if (index >= 0) choose(index, true);
  });
  map.addEventListener("keydown", (event) => moveInMap(event, cells, choose));
  if (cells.length) choose(0, false);
  return element("div", { class: "layer-view" }, element("div", { class: "map-column" }, mapKey(layers), map, summary), details);
}

// The chosen layer in one line, which stays in sight where the details lie below the map.
function layerSummary(row) {
  return [
    element("b", {}, `Layer ${row.layer}`),
    element("span", {}, `${row.attention}, ${row.feed_forward}, ${decimalBytes(row.bytes)}`),
    element("span", { class: "more" }, "Details"),
  ];
}

// The nearest cell of the next row, up (-1) or down (1); the same cell where there is none.
function verticalNeighbour(cells, at, direction) {
  const here = cells[at].getBoundingClientRect();
  let best = at;
  let least = Infinity;
  cells.forEach((other, index) => {
    const { top, left } = other.getBoundingClientRect();
    const away = (top - here.top) * direction;
    const distance = away * 1000 + Math.abs(left - here.left);
    if (away > 1 && distance < least) [best, least] = [index, distance];
  });
  return best;
}

function moveInMap(event, cells, choose) {
  const at = cells.indexOf(document.activeElement);
  if (at < 0 || event.altKey || event.ctrlKey || event.metaKey) return;
  const last = cells.length - 1;
  const next = {
    ArrowRight: at + 1,
    ArrowLeft: at - 1,
    ArrowDown: verticalNeighbour(cells, at, 1),
    ArrowUp: verticalNeighbour(cells, at, -1),
    Home: 0,
    End: last,
  }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  choose(Math.min(last, Math.max(0, next)), true);
}

// What the cells' looks mean, with how many there are.
function mapKey(layers) {
  const number = (test) => count(layers.filter(test).length);
  const entry = (className, title, note, test) =>
    element(
      "li",
      {},
      element("span", { class: `key-cell layer ${className}`, "aria-hidden": "true" }, element("span", { class: "layer-feed" })),
      element("span", {}, element("b", {}, `${number(test)} ${title}`), " ", note),
    );
  return element(
    "ul",
    { class: "map-key", "aria-label": "Key to the map" },
    entry("KDA", "KDA", "linear attention: a state of fixed size", (row) => row.attention === "KDA"),
    entry("MLA", "MLA", "full attention over a latent cache, no rotation", (row) => row.attention === "MLA"),
    entry("MoE", "MoE", "routed experts, dotted foot", (row) => row.feed_forward === "MoE"),
    entry("dense", "dense", "one plain MLP, solid foot", (row) => row.feed_forward === "dense"),
    element(
      "li",
      { class: "bank-key" },
      element("span", { class: "bank", "aria-hidden": "true" }, element("i", { class: "full" }), element("i", { class: "full" }), element("i")),
      element("span", {}, "the bank while a block runs: one square a finished vector"),
    ),
  );
}
