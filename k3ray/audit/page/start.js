// The page put together out of the snapshot that lies in it.

const SNAPSHOT_FORMAT = "k3ray audit";
const SNAPSHOT_VERSION = 1;

const SOURCE_MEANS = {
  directory: "a local directory",
  http: "HTTP byte ranges",
  "config and index only": "config and index only: no shard was opened",
};

function tile(term, figure, note) {
  return element("div", {}, element("dt", {}, term), element("dd", {}, figure, note && element("span", { class: "tile-note" }, note)));
}

function buildMasthead(snapshot, place) {
  const { source, statements } = snapshot;
  const differing = statements.filter((statement) => statement.agrees === false).length;
  const agreeing = statements.filter((statement) => statement.agrees === true).length;
  const share = known(source.total_bytes) && source.total_bytes > 0 ? source.fetched_bytes / source.total_bytes : null;
  place.append(
    element("div", { class: "masthead-line" }, element("p", { class: "eyebrow" }, "k3ray audit"), themeSwitch()),
    element("h1", {}, "What this checkpoint is, and how we know"),
    element(
      "dl",
      { class: "provenance" },
      fact("source", element("code", {}, source.address), ` (${SOURCE_MEANS[source.kind]})`),
      source.revision && fact("revision", element("code", {}, source.revision)),
      fact("made", `${snapshot.made_at.replace("T", " ").replace("Z", " UTC")} by k3ray ${snapshot.k3ray}`),
    ),
    element(
      "dl",
      { class: "tiles" },
      tile("layers", count(snapshot.layers.length)),
      tile("tensors", count(snapshot.kinds.reduce((sum, row) => sum + row.entries, 0)), plural(snapshot.kinds.length, "kind")),
      tile("bytes of shards", decimalBytes(source.total_bytes), known(source.total_bytes) ? `${count(source.total_bytes)} B` : null),
      tile("read for this audit", decimalBytes(source.fetched_bytes), share === null ? null : `${percent(share, 3)} of the shards\u2019 bytes`),
      tile("compared and agree", count(agreeing), `of ${count(agreeing + differing)} compared`),
      tile("compared and differ", count(differing), differing ? "shown first in every view" : "none"),
    ),
  );
}

// The system's choice, or the other one for reading in a different light.
function themeSwitch() {
  const themes = ["system", "light", "dark"];
  const button = element("button", { type: "button", class: "plain theme", id: "theme" });
  const reflect = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => reflect(themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length]));
  reflect("system");
  return button;
}

function viewsOf(snapshot) {
  return [
    {
      id: "layers",
      title: "Layer map",
      short: "Layers",
      purpose: "A token passes every layer, from left to right and row by row. Colour says how a layer attends, its foot which feed-forward part follows. A row is one AttnRes block: its layers add to one running sum, which joins the bank when the next row begins; every layer after it reads a mix of the bank and its own row\u2019s sum.",
      content: [layerMap(snapshot.layers), statementSection(snapshot, "layers", { title: "What the audit says about the layers" })],
    },
    {
      id: "tensors",
      title: "Tensor anatomy",
      short: "Tensors",
      purpose: "What the bytes are: kinds of tensor, their shapes, and the inside of one expert.",
      content: [tensorShares(snapshot.kinds), expertAnatomy(snapshot.kinds), statementSection(snapshot, "tensors", { title: "What the audit says about the tensors" }), kindTable(snapshot.kinds)],
    },
    {
      id: "parameters",
      title: "Parameter audit",
      short: "Parameters",
      purpose: "Where config, code and checkpoint meet in the values, and where they do not.",
      content: [aLogAudit(snapshot), rangePlots(snapshot.statistics), probeSection(snapshot.probe), statementSection(snapshot, "parameters", { title: "What else the audit says about the parameters", placed: isALog })],
    },
    {
      id: "boundary",
      title: "Reproduction boundary",
      short: "Boundary",
      purpose: "Who measured what, and where: done here, recorded by others, and left open.",
      content: boundaryView(snapshot),
    },
  ];
}

function start() {
  const snapshot = JSON.parse(document.getElementById("snapshot").textContent);
  const views = document.getElementById("views");
  if (snapshot.format !== SNAPSHOT_FORMAT || snapshot.version !== SNAPSHOT_VERSION) {
    views.append(element("p", { class: "notice" }, `This page shows ${SNAPSHOT_FORMAT} version ${SNAPSHOT_VERSION}; its data says ${snapshot.format} version ${snapshot.version}.`));
    return;
  }
  document.title = `k3ray audit of ${visible(snapshot.source.address)}`;
  buildMasthead(snapshot, document.getElementById("masthead"));
  buildTabs(viewsOf(snapshot), views);
  buildFilters(document.getElementById("controls"));
  buildReadFirst(snapshot, document.getElementById("masthead"));
  document.getElementById("colophon").append(
    element("p", {}, `Made by k3ray ${snapshot.k3ray} from one JSON snapshot, which lies in this file. Nothing here was fetched, and nothing leaves it.`),
  );
}

start();
