// What to read first: the few things that this audit has to say, each a way to its view.

function readFirst(snapshot) {
  const { statements, source } = snapshot;
  const differing = statements.filter(({ agrees }) => agrees === false);
  const agreeing = statements.filter(({ agrees }) => agrees === true).length;
  const open = statements.filter(({ kind }) => kind === "U").length;
  const sizes = aLogSizes(snapshot.kinds);
  const points = [];
  if (differing.length) {
    points.push([differing[0].view, `${plural(differing.length, "statement")} of ${count(agreeing + differing.length)} compared ${differing.length === 1 ? "differs" : "differ"}.`, `First: ${differing[0].subject}.`, "differs"]);
  } else if (agreeing) {
    points.push(["tensors", "Nothing that was compared differs.", `${plural(agreeing, "statement")} close config, index${source.kind === "config and index only" ? "" : ", headers"} and rules against each other.`, "agrees"]);
  }
  if (sizes && sizes.stored !== sizes.heads) {
    points.push(["parameters", `A_log is stored as ${shapeText(sizes.row.shape)} for ${count(sizes.heads)} heads.`, "Config, code and checkpoint do not say the same; what readers do with the rest.", "differs"]);
  }
  if (source.kind === "config and index only") {
    points.push(["boundary", "No shard was opened.", "Names are observed; shapes and bytes are derived from rules, and no value was read.", "open"]);
  }
  if (open) {
    points.push(["boundary", `${plural(open, "question")} ${open === 1 ? "is" : "are"} left open.`, "What others recorded stands beside it, and is never called ours.", "open"]);
  }
  return points;
}

function buildReadFirst(snapshot, place) {
  const items = readFirst(snapshot).map(([view, point, why, look]) =>
    element("li", { class: look }, element("a", { href: `#${view}` }, point), " ", why),
  );
  if (items.length) place.append(element("nav", { class: "read-first", "aria-label": "What to read first" }, element("h2", {}, "Read first"), element("ul", {}, items)));
}
