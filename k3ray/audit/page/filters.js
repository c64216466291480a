// Legend and filters: which kinds of evidence and whose are shown. The legend's entries are the switches.

const shown = { kinds: new Set(Object.keys(EVIDENCE)), owners: new Set(["ours", "others"]), onlyDiffering: false };

const COUNTED = "[data-kind]:not([data-repeated])";

// A list whose items can be filtered away says so instead of standing there empty.
function filteredList(list) {
  list.setAttribute("data-filtered", "");
  return list;
}

function isShown(item) {
  const { kind, by, agrees } = item.dataset;
  return (
    (kind === "" || shown.kinds.has(kind)) && shown.owners.has(by) && (!shown.onlyDiffering || agrees === "false")
  );
}

function applyFilters() {
  let visibleItems = 0;
  const items = document.querySelectorAll("[data-kind]");
  const counted = [...items].filter((item) => item.matches(COUNTED)).length;
  for (const item of items) {
    const keep = isShown(item);
    visibleItems += keep && item.matches(COUNTED) ? 1 : 0;
    if (item.dataset.filter === "dim") item.classList.toggle("dimmed", !keep);
    else item.hidden = !keep;
  }
  for (const list of document.querySelectorAll("[data-filtered]")) noteHidden(list);
  const all = visibleItems === counted;
  document.getElementById("shown-count").textContent = all
    ? `All ${count(counted)} items of evidence are shown.`
    : `${count(visibleItems)} of ${count(counted)} items of evidence are shown.`;
  document.getElementById("show-all").hidden = all;
}

function noteHidden(list) {
  const items = [...list.querySelectorAll('[data-filter="hide"]')];
  const hiddenItems = items.filter((item) => item.hidden).length;
  let note = list.nextElementSibling;
  if (!note?.classList.contains("hidden-note")) {
    note = element("p", { class: "hidden-note" });
    list.after(note);
  }
  note.textContent = `${plural(hiddenItems, "item")} here hidden by the filters.`;
  note.hidden = hiddenItems === 0;
  list.classList.toggle("all-hidden", items.length > 0 && hiddenItems === items.length);
}

function toggleButton(className, content, isPressed, flip) {
  const button = element("button", { type: "button", class: `switch ${className}` }, content);
  button.reflect = () => button.setAttribute("aria-pressed", String(isPressed()));
  button.addEventListener("click", () => {
    flip();
    button.reflect();
    applyFilters();
  });
  button.reflect();
  return button;
}

function membership(set, value) {
  return [() => set.has(value), () => (set.has(value) ? set.delete(value) : set.add(value))];
}

function buildFilters(place) {
  const counted = (selector) => element("span", { class: "number" }, count(document.querySelectorAll(COUNTED + selector).length));
  const kinds = Object.entries(EVIDENCE).map(([kind, { meaning }]) =>
    toggleButton(
      `kind-switch kind-${kind}`,
      [badge(kind), counted(`[data-kind="${kind}"]`), element("span", { class: "meaning" }, meaning)],
      ...membership(shown.kinds, kind),
    ),
  );
  const owners = [["ours", OURS], ["others", OTHERS]].map(([key, by]) =>
    toggleButton("owner-switch", [owner(by), counted(`[data-by="${key}"]`)], ...membership(shown.owners, key)),
  );
  const differing = toggleButton(
    "differing-switch",
    ["only what ", verdict(false), counted('[data-agrees="false"]')],
    () => shown.onlyDiffering,
    () => (shown.onlyDiffering = !shown.onlyDiffering),
  );
  const switches = [...kinds, ...owners, differing];
  const showAll = element("button", { type: "button", id: "show-all", class: "plain" }, "Show all");
  showAll.addEventListener("click", () => {
    Object.keys(EVIDENCE).forEach((kind) => shown.kinds.add(kind));
    ["ours", "others"].forEach((by) => shown.owners.add(by));
    shown.onlyDiffering = false;
    switches.forEach((button) => button.reflect());
    applyFilters();
  });
  place.append(
    element("h2", { class: "controls-title" }, "What each statement rests on"),
    element("div", { class: "kind-switches", role: "group", "aria-label": "Kinds of evidence shown" }, kinds),
    element(
      "div",
      { class: "other-switches", role: "group", "aria-label": "Whose evidence is shown" },
      owners,
      differing,
      element("p", { class: "shown-line" }, element("span", { id: "shown-count", role: "status" }), " ", showAll),
    ),
  );
  applyFilters();
}
