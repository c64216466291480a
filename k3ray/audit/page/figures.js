// Numbers as text: thousands separators, units, and a plain word where there is no number.

const NOT_KNOWN = "not known";
const MINUS = "\u2212";

function known(value) {
  return value !== null && value !== undefined && Number.isFinite(value);
}

function count(value) {
  return known(value) ? value.toLocaleString("en-US", { maximumFractionDigits: 0 }) : NOT_KNOWN;
}

function decimalBytes(value) {
  if (!known(value)) return NOT_KNOWN;
  for (const [unit, factor] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (Math.abs(value) >= factor) return `${(value / factor).toFixed(3)} ${unit}`;
  }
  return `${count(value)} B`;
}

// The rounded size to read and the exact one to compare, both on the page.
function bothBytes(value) {
  if (!known(value)) return element("span", { class: "unknown" }, NOT_KNOWN);
  if (value < 1000) return `${count(value)} B`;
  return [element("span", { class: "rounded" }, decimalBytes(value)), " ", element("span", { class: "exact" }, `${count(value)} B`)];
}

function percent(share, digits = 2) {
  if (!known(share)) return NOT_KNOWN;
  const rounded = (share * 100).toFixed(digits);
  return share > 0 && Number(rounded) === 0 ? `< ${(10 ** -digits).toFixed(digits)} %` : `${rounded} %`;
}

function real(value) {
  if (!known(value)) return NOT_KNOWN;
  if (Number.isInteger(value)) return count(value).replace("-", MINUS);
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : value.toFixed(size < 0.1 ? 5 : 4);
  return text.replaceAll("-", MINUS);
}

function shapeText(shape) {
  return `[${shape.map(count).join(" \u00d7 ")}]`;
}

function plural(number, one, many) {
  return `${count(number)} ${number === 1 ? one : many ?? `${one}s`}`;
}

// "0-3, 7" out of 0, 1, 2, 3, 7.
function ranges(numbers) {
  const parts = [];
  for (const number of [...numbers].sort((a, b) => a - b)) {
    const last = parts.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else parts.push([number, number]);
  }
  return parts.map(([first, last]) => (first === last ? `${first}` : `${first}\u2013${last}`)).join(", ");
}
