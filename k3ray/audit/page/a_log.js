// A_log: how many entries are stored, how many heads there are, and what readers do about the difference.

// The stored length is A_log's; the heads are the rows of b_proj, which has one for each. null where either is absent.
function aLogSizes(kinds) {
  const stored = kinds.find((row) => row.kind.endsWith(".A_log") && row.shape.length > 0);
  const heads = kinds.find((row) => row.kind.endsWith(".b_proj.weight") && row.shape.length === 2);
  if (!stored || !heads) return null;
  return {
    row: stored,
    stored: stored.shape.reduce((product, size) => product * size, 1),
    heads: heads.shape[0],
    letter: stored.letter === "O" && heads.letter === "O" ? "O" : "D",
  };
}

function aLogPicture({ row, stored, heads, letter }) {
  const entries = Array.from({ length: Math.max(stored, heads) }, (_, index) =>
    element("i", { class: index >= stored ? "absent" : index < heads ? "head" : "tail" }),
  );
  const difference = stored - heads;
  const verdictText =
    difference > 0
      ? `Entries ${count(heads)} to ${count(stored - 1)} belong to no head.`
      : difference < 0 ? `${plural(-difference, "head")} would have no entry.` : "One entry for each head.";
  return element(
    "div",
    { class: "a-log-picture" },
    element(
      "p",
      { class: "a-log-sizes" },
      element("span", {}, element("b", {}, shapeText(row.shape)), " stored"),
      element("span", { class: "against", "aria-label": difference ? "is not" : "equals" }, difference ? "\u2260" : "="),
      element("span", {}, element("b", {}, count(heads)), " heads"),
    ),
    element("div", { class: "a-log-entries", role: "img", "aria-label": `${count(stored)} stored entries. ${verdictText}` }, entries),
    element(
      "p",
      { class: "a-log-key" },
      element("span", {}, element("i", { class: "head", "aria-hidden": "true" }), ` ${count(Math.min(stored, heads))} read, one a head`),
      difference !== 0 && element("span", {}, element("i", { class: difference > 0 ? "tail" : "absent", "aria-hidden": "true" }), ` ${count(Math.abs(difference))} ${difference > 0 ? "read by no head" : "missing"}`),
    ),
    element("p", { class: "standing" }, badge(letter), owner(OURS), element("span", { class: "source" }, "shapes of A_log and b_proj")),
  );
}

function aLogReaders(statements) {
  const items = statements.map((statement) =>
    element(
      "li",
      { class: statement.by === OURS ? "reader ours" : "reader others", ...evidence(statement.kind, statement.by, statement.agrees), "data-id": statement.id },
      element("div", { class: "standing" }, badge(statement.kind), owner(statement.by)),
      element("p", {}, element("b", {}, statement.subject), ` ${statement.found}`),
      statement.source && element("p", { class: "source" }, element("span", {}, "source "), statement.source),
    ),
  );
  return items.length > 0 && [element("h4", {}, "What readers do with it"), filteredList(element("ul", { class: "readers" }, items))];
}

function isReader(statement) {
  return statement.id.startsWith("a_log.reader.");
}

function isALog(statement) {
  return statement.view === "parameters" && statement.id.startsWith("a_log.");
}

function aLogAudit(snapshot) {
  const sizes = aLogSizes(snapshot.kinds);
  const statements = snapshot.statements.filter(isALog);
  if (!sizes && !statements.length) return element("p", { class: "empty" }, "The snapshot says nothing about A_log.");
  const main = statements.filter((statement) => statement.main);
  const rest = statements.filter((statement) => !statement.main && !isReader(statement));
  const large = statementList(main, "A_log, main statement");
  large.classList.add("large");
  return element(
    "section",
    { class: "block a-log" },
    element("h3", {}, "A_log: one number a head, stored at another length"),
    element("p", { class: "lead" }, "A_log sets how fast each KDA head forgets. The code indexes it by head; read by channel instead, the model stays fluent and is wrong."),
    element("div", { class: "a-log-main" }, sizes && aLogPicture(sizes), main.length > 0 && element("div", {}, large)),
    rest.length > 0 && statementList(rest, "More about A_log"),
    aLogReaders(statements.filter(isReader)),
  );
}
