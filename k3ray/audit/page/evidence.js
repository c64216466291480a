// What a statement rests on: five kinds, each with a letter, a word, a colour and a shape, and whose it is.

const OURS = "k3ray";
const OTHERS = "recorded by others";

const EVIDENCE = {
  O: { word: "observed", meaning: "read in the files themselves", shape: ["circle", { cx: 8, cy: 8, r: 6.5 }] },
  D: { word: "derived", meaning: "follows by a rule from what was observed", shape: ["path", { d: "M8 1 15 14.5H1Z" }] },
  X: { word: "executed", meaning: "computed on the machine that made this", shape: ["path", { d: "M8 .5 15.5 8 8 15.5 .5 8Z" }] },
  S: { word: "synthetic", meaning: "measured on made-up inputs", shape: ["path", { d: "M4 1.5h8L15.5 8 12 14.5H4L.5 8Z" }] },
  U: { word: "unresolved", meaning: "open: not settled here", shape: ["rect", { x: 2, y: 2, width: 12, height: 12, class: "open" }] },
};

function mark(kind) {
  const [tag, attributes] = EVIDENCE[kind].shape;
  return drawing(
    "svg",
    { viewBox: "0 0 16 16", class: "mark", "aria-hidden": "true", focusable: "false" },
    drawing(tag, attributes),
  );
}

function badge(kind) {
  if (!(kind in EVIDENCE)) throw new Error(`evidence kind ${JSON.stringify(kind)} is none of ${Object.keys(EVIDENCE)}`);
  return element(
    "span",
    { class: `badge kind-${kind}`, title: `${EVIDENCE[kind].word}: ${EVIDENCE[kind].meaning}` },
    mark(kind),
    element("b", {}, kind),
    element("span", {}, EVIDENCE[kind].word),
  );
}

function owner(by) {
  return by === OURS
    ? element("span", { class: "owner ours" }, "by k3ray")
    : element("span", { class: "owner others" }, element("span", { "aria-hidden": "true" }, "\u201c\u2009"), by, element("span", { "aria-hidden": "true" }, "\u2009\u201d"));
}

// agrees: true, false, or null where nothing was compared.
function verdict(agrees) {
  if (agrees === null || agrees === undefined) return null;
  return agrees
    ? element("span", { class: "verdict agrees" }, "\u2713 agrees")
    : element("span", { class: "verdict differs" }, "\u2260 differs");
}

// The attributes by which the filters find an item of evidence. how: "hide" or "dim".
function evidence(kind, by = OURS, agrees = null, how = "hide") {
  return { "data-kind": kind, "data-by": by === OURS ? "ours" : "others", "data-agrees": String(agrees), "data-filter": how };
}
