// The four views as tabs: arrows, Home and End move and show; the address's fragment names the view.

function buildTabs(views, place) {
  const tabs = views.map((view) =>
    element(
      "button",
      { type: "button", role: "tab", id: `tab-${view.id}`, "aria-controls": `view-${view.id}` },
      element("span", { class: "long" }, view.title),
      element("span", { class: "short" }, view.short),
    ),
  );
  const panels = views.map((view) =>
    element(
      "section",
      { role: "tabpanel", id: `view-${view.id}`, "aria-labelledby": `tab-${view.id}`, tabindex: 0, class: `view view-${view.id}` },
      element("header", { class: "view-head" }, element("h2", {}, view.title), element("p", {}, view.purpose)),
      view.content,
    ),
  );

  function show(index, { focus = false, name = true } = {}) {
    tabs.forEach((tab, position) => {
      tab.setAttribute("aria-selected", String(position === index));
      tab.tabIndex = position === index ? 0 : -1;
      panels[position].hidden = position !== index;
    });
    if (focus) tabs[index].focus();
    if (name) nameInAddress(views[index].id);
  }

  const list = element("div", { role: "tablist", "aria-label": "Views of the audit", class: "tabs" }, tabs);
  list.addEventListener("click", (event) => {
    const index = tabs.indexOf(event.target.closest('[role="tab"]'));
    if (index >= 0) show(index, { focus: true });
  });
  list.addEventListener("keydown", (event) => {
    const at = tabs.indexOf(document.activeElement);
    const last = tabs.length - 1;
    const next = { ArrowRight: at === last ? 0 : at + 1, ArrowLeft: at === 0 ? last : at - 1, Home: 0, End: last }[event.key];
    if (at < 0 || next === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    show(next, { focus: true });
  });
  const fromAddress = (options) => {
    const index = views.findIndex((view) => view.id === location.hash.slice(1));
    if (index >= 0) show(index, options);
    return index >= 0;
  };
  window.addEventListener("hashchange", () => {
    if (fromAddress({ name: false })) list.scrollIntoView({ block: "start" });
  });
  place.append(list, ...panels);
  if (!fromAddress({ name: false })) show(0, { name: false });
}

function nameInAddress(id) {
  try {
    history.replaceState(null, "", `#${id}`);
  } catch (refusal) {
    // A document without an address of its own (srcdoc, a preview) has none to change; the view is shown all the same.
    if (refusal.name !== "SecurityError") throw refusal;
  }
}
