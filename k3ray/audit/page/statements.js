// Statements as a list: what was found, what was expected, what the statement rests on and where it comes from.

// repeated: the same statement stands in another view too and is counted there.
function statementItem(statement, repeated = false) {
  const same = statement.agrees === true && statement.found === statement.expected;
  const compared = statement.expected !== "" && !same;
  return element(
    "li",
    {
      class: `statement ${statement.by === OURS ? "ours" : "others"}${statement.agrees === false ? " differing" : ""}`,
      ...evidence(statement.kind, statement.by, statement.agrees),
      "data-id": statement.id,
      "data-repeated": repeated,
    },
    element("div", { class: "standing" }, badge(statement.kind), owner(statement.by), verdict(statement.agrees)),
    element("h4", {}, statement.subject),
    element(
      "dl",
      { class: compared ? "comparison" : "comparison single" },
      element("div", { class: "found" }, element("dt", {}, statement.kind === "U" ? "so far" : same ? "found, as expected" : "found"), element("dd", {}, statement.found || "nothing")),
      compared && element("div", {}, element("dt", {}, "expected"), element("dd", {}, statement.expected)),
    ),
    statement.source && element("p", { class: "source" }, element("span", {}, "source "), statement.source),
  );
}

// Differences first, then in the snapshot's order.
function statementList(statements, label, isRepeated = () => false) {
  const ordered = [...statements].sort((a, b) => (a.agrees === false ? 0 : 1) - (b.agrees === false ? 0 : 1));
  return filteredList(element("ul", { class: "statements", "aria-label": label }, ordered.map((statement) => statementItem(statement, isRepeated(statement)))));
}

// The statements of one view. Those marked main stand first and large, unless the view has placed them itself.
function statementSection(snapshot, view, { title, placed = () => false }) {
  const here = snapshot.statements.filter((statement) => statement.view === view && !placed(statement));
  const main = here.filter((statement) => statement.main);
  const rest = here.filter((statement) => !statement.main);
  const lists = [];
  if (main.length) {
    const list = statementList(main, `${title}, main statements`);
    list.classList.add("large");
    lists.push(list);
  }
  if (rest.length) lists.push(statementList(rest, title));
  if (!here.length) lists.push(element("p", { class: "empty" }, "The snapshot holds no further statement for this view."));
  return element("section", { class: "block" }, element("h3", {}, title), lists);
}
