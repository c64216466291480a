// The reproduction boundary: who measured what where, what was computed here, and what nobody has settled.

function boundaryMatrix(snapshot) {
  const kinded = [...snapshot.statements, ...snapshot.statistics.map(({ letter, by }) => ({ kind: letter, by }))];
  const tally = (kind, by) => kinded.filter((item) => item.kind === kind && item.by === by).length;
  const rows = Object.keys(EVIDENCE).map((kind) =>
    element(
      "tr",
      {},
      cell(badge(kind), { header: true }),
      [OURS, OTHERS].map((by) => cell(count(tally(kind, by)), { numeric: true, className: tally(kind, by) ? "" : "none" })),
      cell(EVIDENCE[kind].meaning, { className: "meaning" }),
    ),
  );
  rows.push(
    element(
      "tr",
      {},
      cell("recorded figures", { header: true }),
      cell(count(0), { numeric: true, className: "none" }),
      cell(count(snapshot.recorded.length), { numeric: true }),
      cell("measured elsewhere and not repeated here, so of none of the kinds above", { className: "meaning" }),
    ),
  );
  const columns = [{ title: "evidence" }, { title: "by k3ray", numeric: true }, { title: "recorded by others", numeric: true }, { title: "what it means" }];
  return scrolledTable("Statements and statistics of this audit by what they rest on", columns, rows, { className: "matrix-table" });
}

function boundaryRow(owned, who, what, where, value, note, attributes, standing) {
  return element(
    "tr",
    { class: owned ? "ours" : "others", ...attributes },
    cell(who, { header: true }),
    cell(what),
    cell(value, { className: "value" }),
    cell(where),
    cell(note),
    cell(standing, { className: "standing-cell" }),
  );
}

// A figure stands out; a sentence in its place does not.
function figure(text) {
  return element(text.length <= 24 ? "b" : "span", {}, text);
}

// What was found, its leading figure standing out from the words behind it.
function finding(text) {
  const [, number, words] = /^([\d.,]+(?:e[+-]?\d+)?)( .*)$/.exec(text) ?? [];
  return number ? [element("b", {}, number), words] : figure(text);
}

// What follows the first semicolon of a finding is a note to it.
function statementBoundaryRow(statement) {
  const [found, ...notes] = statement.found.split("; ");
  return boundaryRow(
    statement.by === OURS,
    statement.by === OURS ? "k3ray" : "others",
    statement.subject,
    statement.source || NOT_KNOWN,
    [finding(found), statement.expected && element("p", { class: "note" }, "expected ", element("span", { class: statement.expected.length <= 20 ? "nowrap" : null }, statement.expected))],
    notes.join("; "),
    { ...evidence(statement.kind, statement.by, statement.agrees), "data-id": statement.id },
    [badge(statement.kind), " ", owner(statement.by), " ", verdict(statement.agrees)],
  );
}

function recordedRow(row) {
  return boundaryRow(
    false,
    row.who,
    row.what,
    row.where || NOT_KNOWN,
    [figure(row.value), row.unit && ` ${row.unit}`],
    row.note,
    { ...evidence("", OTHERS) },
    owner(row.who.startsWith("k3ray") ? `recorded by ${row.who}` : OTHERS),
  );
}

function boundaryTable(title, lead, rows) {
  const columns = ["who", "what", "figure", "where", "note", "evidence"].map((name) => ({ title: name }));
  return element(
    "section",
    { class: "block" },
    element("h3", {}, title),
    element("p", { class: "lead" }, lead),
    rows.length
      ? filteredList(scrolledTable(title, columns, rows, { className: "boundary-table", quiet: true }))
      : element("p", { class: "empty" }, "The snapshot holds none."),
  );
}

function boundaryView(snapshot) {
  const settled = snapshot.statements.filter(({ view, kind }) => view === "boundary" && kind !== "U");
  const ours = settled.filter(({ by }) => by === OURS);
  const theirs = settled.filter(({ by }) => by !== OURS);
  const unresolved = snapshot.statements.filter(({ kind }) => kind === "U");
  const open = statementList(unresolved, "Unresolved", ({ view }) => view !== "boundary");
  return [
    element("section", { class: "block" }, boundaryMatrix(snapshot)),
    element(
      "section",
      { class: "block" },
      element("h3", {}, "Unresolved"),
      element("p", { class: "lead" }, "Everything that this audit leaves open, out of every view."),
      unresolved.length ? open : element("p", { class: "empty" }, "Nothing is left open."),
    ),
    boundaryTable("Done here", "Computed or compared by k3ray on the machine that made this snapshot.", ours.map(statementBoundaryRow)),
    boundaryTable("Recorded, not measured by this audit", "Figures as recorded, under their conditions. This audit has not repeated them, and they do not compare across machines.", [...theirs.map(statementBoundaryRow), ...snapshot.recorded.map(recordedRow)]),
    sourceFiles(snapshot.source),
  ];
}

// What a checksum is over, so that anybody with the file can compute the same.
function placesText(file) {
  if (!file.places.length) return file.sha256_of;
  return `bytes ${file.places.map(([begin, end]) => `${count(begin)}\u2013${count(end - 1)}`).join(", then ")}`;
}

function sourceFiles(source) {
  const columns = [{ title: "file" }, { title: "size", numeric: true }, { title: "read", numeric: true }, { title: "ranges", numeric: true }, { title: "sha256" }];
  const rows = source.files.map((file) =>
    element(
      "tr",
      {},
      cell(element("code", {}, file.name), { header: true }),
      cell(bothBytes(file.bytes), { numeric: true }),
      cell(bothBytes(file.fetched_bytes), { numeric: true }),
      cell(count(file.ranges), { numeric: true }),
      cell(file.sha256 ? [element("span", { class: "of" }, placesText(file), " "), element("code", { class: "digest" }, file.sha256)] : "not read"),
    ),
  );
  return element(
    "section",
    { class: "block" },
    element("h3", {}, "What was read"),
    element("p", { class: "lead" }, "Files of the source, the bytes that this audit read of them, and the checksum of those bytes."),
    source.files.length ? scrolledTable(`${plural(source.files.length, "file")}`, columns, rows, { className: "files-table" }) : element("p", { class: "empty" }, "The snapshot names no file."),
  );
}
