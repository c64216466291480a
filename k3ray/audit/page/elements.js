// Making elements. Text reaches the page only through here, as text nodes and attributes, never as markup.

const SVG = "http://www.w3.org/2000/svg";

// Characters that show nothing or turn the text around them: shown by number, so that a name reads as it is.
const INVISIBLE = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff]/g;

function visible(text) {
  return String(text).replace(
    INVISIBLE,
    (hidden) => `\u27e8U+${hidden.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}\u27e9`,
  );
}

// A word that is longer than a narrow column, like a tensor's name, may break after its dots and the like.
function breakable(text) {
  if (!/[^\s]{20}/.test(text)) return [text];
  const parts = text.split(/(?<=[^\s._/-]{3}[._/-])(?=[^\s._/-]{3})/);
  return parts.flatMap((part, index) => (index ? [document.createElement("wbr"), part] : [part]));
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") {
      for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    } else if (name === "set") {
      for (const [property, setting] of Object.entries(value)) node.style.setProperty(property, setting);
    } else {
      node.setAttribute(name, value === true ? "" : visible(value));
    }
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    node.append(...(child instanceof Node ? [child] : breakable(visible(child))));
  }
  return node;
}

// element("p", {class: "note", on: {click: f}, set: {"--share": 0.5}}, "text", otherElement, [more])
function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// A table that scrolls inside its own box, which the keyboard can reach. columns: [{title, numeric}].
// quiet: the caption is for screen readers only, because a heading above already says it.
function scrolledTable(caption, columns, rows, { className = "", quiet = false } = {}) {
  const head = columns.map((column) =>
    element("th", { scope: "col", class: column.numeric ? "numeric" : null }, column.title),
  );
  return element(
    "div",
    { class: `scroller ${className}`, tabindex: 0, role: "region", "aria-label": caption },
    element(
      "table",
      {},
      element("caption", { class: quiet ? "unseen" : null }, caption),
      element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, rows),
    ),
  );
}

function cell(content, { numeric = false, header = false, className = "" } = {}) {
  const classes = [numeric ? "numeric" : "", className].join(" ").trim();
  return element(header ? "th" : "td", { class: classes || null, scope: header ? "row" : null }, content);
}
