// One routed expert: its three matrices, packed weights and scales, and what one byte holds.

// Magnitudes of E2M1 by its three low bits; the fourth bit is the sign.
const E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6];
const MATRICES = [["w1", "gate"], ["w3", "up"], ["w2", "down"]];

function expertMatrix(kinds, name) {
  const find = (part) => kinds.find((row) => row.where === "routed experts" && row.kind.endsWith(`.${name}.${part}`) && row.shape.length === 2);
  const packed = find("weight_packed");
  const scales = find("weight_scale");
  return packed && scales ? { packed, scales } : null;
}

function expertAnatomy(kinds) {
  const found = MATRICES.map(([name, role]) => ({ name, role, ...expertMatrix(kinds, name) }));
  if (!found.every((matrix) => matrix.packed)) {
    return element("p", { class: "empty" }, "The snapshot lists no packed routed experts, so there is no expert to draw.");
  }
  const size = (row) => row.shape[0] * row.shape[1];
  const bytes = found.reduce((sum, { packed, scales }) => sum + size(packed) + size(scales), 0);
  const weights = found.reduce((sum, { packed }) => sum + 2 * size(packed), 0);
  const unit = 1 / Math.max(...found.map(({ packed }) => packed.shape[1]));
  const letter = found.every(({ packed, scales }) => packed.letter === "O" && scales.letter === "O") ? "O" : "D";
  return element(
    "section",
    { class: "block expert" },
    element("h3", {}, "One routed expert"),
    element(
      "p",
      { class: "lead" },
      `${count(bytes)} B for ${count(weights)} weights, ${(bytes / weights).toFixed(5)} B each. `, badge("D"), " ", owner(OURS),
    ),
    element("div", { class: "matrices" }, found.map((matrix) => matrixPicture(matrix, unit))),
    element("p", { class: "note" }, "Packed weights solid, scales striped; one scale for all widths and one for all heights. Shapes ", badge(letter), " ", owner(OURS)),
    nibblePicture(found[0]),
  );
}

function matrixPicture({ name, role, packed, scales }, unit) {
  const tall = (100 * packed.shape[0] * unit).toFixed(1);
  const part = (row, className, title) =>
    element(
      "div",
      { class: `matrix-part ${className}`, set: { "flex-grow": String(row.shape[1]) } },
      element("i", { set: { height: `${tall}px` }, "aria-hidden": "true" }),
      element("span", {}, element("b", {}, title), ` ${row.dtype} `, element("span", { class: "nowrap" }, shapeText(row.shape))),
    );
  return element(
    "figure",
    { class: "matrix", set: { "--share": String((packed.shape[1] + scales.shape[1]) * unit) } },
    element("figcaption", {}, element("b", {}, name), ` ${role}, ${count(packed.shape[0])} rows of ${count(2 * packed.shape[1])} weights`),
    element("div", { class: "matrix-parts" }, part(packed, "packed", "packed"), part(scales, "scales", "scale")),
  );
}

function bit(name, className) {
  return element("span", { class: `bit ${className}` }, name);
}

function nibblePicture({ packed, scales }) {
  const group = (2 * packed.shape[1]) / scales.shape[1];
  const nibble = (title, column, className) =>
    element(
      "div",
      { class: `nibble ${className}` },
      element("div", { class: "bits", "aria-hidden": "true" }, bit("s", "sign"), bit("e", "exponent"), bit("e", "exponent"), bit("m", "mantissa")),
      element("p", {}, element("b", {}, title), " holds column ", element("b", {}, column)),
    );
  return element(
    "div",
    { class: "nibbles" },
    element("h4", {}, "One packed byte: two weights"),
    element("p", { class: "standing" }, badge("D"), owner(OURS)),
    element("div", { class: "byte", role: "img", "aria-label": "Byte j: the high nibble, bits 7 to 4, holds column 2j+1; the low nibble, bits 3 to 0, holds column 2j. Each is sign, two exponent bits, one mantissa bit." }, nibble("high nibble", "2j + 1", "high"), nibble("low nibble", "2j", "low")),
    element("p", {}, `Weight = E2M1 value \u00d7 2^(scale \u2212 127); one scale byte serves ${plural(group, "consecutive column")}, that is ${plural(group / 2, "packed byte")} of a row. Swapped nibbles leave every statistic as it was and every product wrong.`),
    scrolledTable("The sixteen E2M1 values", [{ title: "nibble" }, ...E2M1.map((_, code) => ({ title: code.toString(2).padStart(3, "0"), numeric: true }))], [
      element("tr", {}, cell("0\u2026 positive", { header: true }), E2M1.map((value) => cell(String(value), { numeric: true }))),
      element("tr", {}, cell("1\u2026 negative", { header: true }), E2M1.map((value) => cell(`${MINUS}${value}`, { numeric: true }))),
    ], { className: "e2m1" }),
  );
}
