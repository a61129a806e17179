// The widget of explorer.py: it draws `state` and `background` and sends clicks; everything is computed in Python.

const SVG = "http://www.w3.org/2000/svg";
const COLORS = ["clean", "corrupted", "patched", "A", "B", "target", "away", "line", "muted", "ink", "paper", "shade"];

/** An element with properties and children; names with a dash are attributes. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children);
  return element;
}

function drawn(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** A name with the number of patches there. */
function counted(name, n) {
  return n ? `${name} (${n} patched)` : name;
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(1).replace(/^-(0\.0)$/, "$1")} %`;
}

/** A number, or several, with four significant digits. */
function digits(value) {
  if (Array.isArray(value)) return value.map(digits).join(", ");
  if (typeof value !== "number") return value ?? "–";
  return Math.abs(value) >= 1e-4 ? String(Number(value.toPrecision(4))) : value.toPrecision(4);
}

/** Position of a patch; the query's for scores and patterns. */
function positionOf(patch) {
  return patch.pos ?? patch.query;
}

/** Options of a select, rebuilt only where they changed, so that an open list stays open. */
function setOptions(select, options, value) {
  const wanted = JSON.stringify(options);
  if (select.dataset.options !== wanted) {
    select.dataset.options = wanted;
    select.replaceChildren(...options.map(([key, words]) => make("option", { value: key, textContent: words })));
  }
  select.value = value;
}

/** The runs by name: clean, corrupted, and patched, or A and B. */
function runsOf({ side, results }) {
  const now = results[side];
  const runs = { clean: { prediction: now.clean_prediction, metric: now.clean_metric },
                 corrupted: { prediction: now.corrupted_prediction, metric: now.corrupted_metric } };
  return comparing(results) ? { ...runs, ...results } : { ...runs, patched: now };
}

/** A number line with a mark for each run: of predictions that are single numbers, otherwise of the metric. */
function numberLine({ target, metric_name }, runs, width) {
  const single = target?.length === 1;
  const title = single ? "prediction for the query" : metric_name;
  const points = single ? { target: target[0] } : {};
  for (const [name, { prediction, metric }] of Object.entries(runs)) points[name] = single ? prediction[0] : metric;
  const known = Object.keys(points).filter((name) => Number.isFinite(points[name]));
  const svg = drawn("svg", { height: 92, width: "100%", role: "img", "aria-label": `number line of the ${title}` });
  svg.append(drawn("text", { x: 0, y: 10 }, title));
  if (!known.length) return svg;
  const values = known.map((name) => points[name]);
  const middle = (Math.min(...values) + Math.max(...values)) / 2;
  const half = (Math.max(...values) - Math.min(...values)) / 2 || Math.abs(middle) || 1;
  const place = (value) => 50 + (41 * (value - middle)) / half; // in percent of the width
  svg.append(drawn("line", { x1: "2%", x2: "98%", y1: 52, y2: 52, class: "axis" }));
  for (const value of [middle - half, middle, middle + half]) {
    const x = `${place(value)}%`;
    svg.append(drawn("line", { x1: x, x2: x, y1: 48, y2: 56, class: "axis" }));
    svg.append(drawn("text", { x, y: 86, "text-anchor": "middle" }, Number(value.toPrecision(3)).toString()));
  }
  for (const name of known) {
    const x = `${place(points[name])}%`;
    const unpatched = name === "clean" || name === "corrupted";
    const color = `var(--${name})`;
    const mark =
      name === "target"
        ? drawn("line", { x1: x, x2: x, y1: 36, y2: 68, stroke: color, "stroke-width": 2, "stroke-dasharray": "3 2" })
        : drawn("circle", { cx: x, cy: 52, r: unpatched ? 8 : 6, fill: unpatched ? "none" : color, stroke: color, "stroke-width": 2.5 });
    mark.append(drawn("title", {}, `${name}: ${digits(points[name])}`));
    mark.dataset.run = name;
    svg.append(mark);
  }
  // Names where there is room for them, each in the lowest row where it meets no other.
  const rows = [[], []];
  for (const name of [...known].reverse()) {
    const x = place(points[name]);
    const row = rows.findIndex((taken) => taken.every((other) => (Math.abs(other - x) * width) / 100 > 62));
    if (row < 0) continue;
    rows[row].push(x);
    const label = drawn("text", { x: `${x}%`, y: 34 - 12 * row, "text-anchor": "middle" }, name);
    label.style.fill = `var(--${name})`;
    svg.append(label);
  }
  return svg;
}

/** Patches with their names; neighbouring positions are joined if they are hidden in the same way or not at all. */
function joined(patches, reasons) {
  const groups = [];
  const here = (patch, words) => words.replaceAll(new RegExp(`(pos|query) ${positionOf(patch)}\\b`, "g"), "$1 @");
  const order = (a, b) => a.component.localeCompare(b.component) || a.layer - b.layer || a.head - b.head || positionOf(a) - positionOf(b);
  [...patches].sort(order).forEach((patch) => {
    const [words, reason] = [patch.words, reasons[patch.words] ?? ""].map((each) => here(patch, each));
    const [pos, last] = [positionOf(patch), groups.at(-1)];
    if (last && pos !== null && pos === last.end + 1 && words === last.words && reason === last.reason) {
      last.end = pos;
      last.names.push(patch.words);
    } else groups.push({ start: pos, end: pos, words, reason, names: [patch.words] });
  });
  return groups.map(({ start, end, words, reason, names }) => {
    const range = (each) => each.replaceAll("@", start === end ? start : `${start} to ${end}`);
    return { words: range(words), reason: range(reason), names };
  });
}

function comparing(sides) {
  return Object.keys(sides).length > 1;
}

function download(name, url) {
  make("a", { href: url, download: name }).click();
}

/** Save what the widget shows as a PNG, or as an SVG in browsers that do not let a page read such a picture. */
async function savePicture(root) {
  const copy = root.cloneNode(true);
  const chosen = [...root.querySelectorAll("select")].map((select) => select.selectedOptions[0].textContent);
  [...copy.querySelectorAll("select")].forEach((select, i) => select.replaceWith(make("b", { textContent: chosen[i] })));
  copy.querySelectorAll(".buttons, .keys, .effect, .error, details, input, progress").forEach((part) => part.remove());
  const style = getComputedStyle(root);
  for (const name of COLORS) copy.style.setProperty(`--${name}`, style.getPropertyValue(`--${name}`));
  const width = Math.max(root.clientWidth, root.querySelector(".grid table").scrollWidth + 24);
  Object.assign(copy.style, { position: "absolute", visibility: "hidden", width: `${width}px`, maxWidth: "none", padding: "12px" });
  root.after(copy);
  const height = copy.offsetHeight;
  copy.remove();
  Object.assign(copy.style, { position: "static", visibility: "visible", background: style.getPropertyValue("--paper") });
  const sheets = [...document.styleSheets].flatMap((sheet) => {
    try {
      return [...sheet.cssRules];
    } catch {
      return []; // of another site
    }
  });
  const rules = sheets.map((rule) => rule.cssText).filter((text) => text.includes(".mechicl-explorer"));
  copy.prepend(make("style", { textContent: rules.join("\n") }));
  const svg = drawn("svg", { width, height });
  svg.append(drawn("foreignObject", { width: "100%", height: "100%" }));
  svg.firstChild.append(copy);
  const source = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(new XMLSerializer().serializeToString(svg))}`;
  const image = new Image();
  image.src = source;
  await image.decode();
  const canvas = make("canvas", { width: 2 * width, height: 2 * height });
  canvas.getContext("2d").drawImage(image, 0, 0, 2 * width, 2 * height);
  try {
    download("patches.png", canvas.toDataURL("image/png"));
  } catch {
    download("patches.svg", source);
  }
}

function render({ model, el }) {
  const send = (message) => model.send(message);
  const choose = (name, value) => {
    model.set(name, value);
    model.save_changes();
  };
  const prompts = Object.fromEntries(
    ["clean", "corrupted"].map((kind) => [
      kind,
      make("select", { "aria-label": `${kind} prompt`, onchange: (e) => send({ kind, prompt: Number(e.target.value) }) }),
    ])
  );
  const component = make("select", {
    "aria-label": "component",
    onchange: (e) => {
      model.set("head", null);
      choose("component", e.target.value);
    },
  });
  const head = make("select", {
    "aria-label": "head",
    onchange: (e) => choose("head", e.target.value === "" ? null : Number(e.target.value)),
  });
  const headField = make("label", {}, "head", head);
  const button = (name, onclick) => make("button", { type: "button", textContent: name, "data-action": name, onclick });
  const actions = Object.fromEntries(["undo", "redo", "clear"].map((kind) => [kind, button(kind, () => send({ kind }))]));
  const compare = button("compare A/B", () => send({ kind: "compare" }));
  const sides = ["A", "B"].map((side) => button(side, () => send({ kind: "side", side })));
  const copy = button("copy as code", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      copy.textContent = "copied";
    } catch {
      details.open = true;
      getSelection().selectAllChildren(code);
      copy.textContent = "selected";
    }
    setTimeout(() => (copy.textContent = "copy as code"), 1500);
  });
  const save = button("save picture", () => savePicture(root));
  const grid = make("div", { className: "grid" });
  const previewed = make("input", { type: "checkbox", onchange: (e) => choose("preview", e.target.checked) });
  const ramp = make("span", { className: "ramp", title: "share of the way from the corrupted to the clean run, by the metric" }, make("i"));
  const effect = make("span", { className: "effect" });
  const progress = make("progress", { "aria-label": "effects of single patches" });
  const preview = make("div", { className: "preview" },
    make("label", {}, previewed, "effect of each patch alone"), ramp, progress, effect);
  const runs = make("tbody");
  const metric = make("th", { scope: "col" });
  const scale = make("div", { className: "scale" });
  const patches = make("div", { className: "patches" });
  const code = make("pre", { tabIndex: 0, "aria-label": "code of these patches" });
  const details = make("details", {}, make("summary", { textContent: "code" }), code);
  const error = make("div", { className: "error", role: "alert" });
  let cells = [];
  let effects = []; // [layer][position]
  let drag = null; // cell where a drag began
  let anchor = null; // cell where a selection by keys began
  let asked = false; // Python computes a piece of `background`
  let visible = true;

  // ---- the grid: clicks, ranges, keys ----

  const place = (cell) => [Number(cell.dataset.layer), Number(cell.dataset.pos)];
  const cellOf = (event) => event.target.closest?.(".cell");

  function drawGrid(state) {
    const focus = grid.contains(document.activeElement) ? document.activeElement.dataset : null;
    const heading = state.labels.map((label) => make("th", { scope: "col" }, make("span", { textContent: label })));
    cells = [];
    const rows = Array.from({ length: state.n_layers }, (_, layer) => {
      const row = state.labels.map((_, pos) =>
        make("button", { type: "button", className: "cell", "data-layer": layer, "data-pos": pos, tabIndex: -1 })
      );
      cells.push(row);
      return make("tr", {}, make("th", { scope: "row", textContent: `layer ${layer}` }), ...row.map((c) => make("td", {}, c)));
    }).reverse(); // layer 0 is at the bottom, as in every figure
    grid.style.setProperty("--positions", state.labels.length);
    grid.replaceChildren(make("table", {}, make("tbody", {}, ...rows), make("tfoot", {}, make("tr", {}, make("td"), ...heading))));
    const current = focus && cells[focus.layer]?.[focus.pos];
    if (current) current.focus();
    (current || cells[0].at(-1)).tabIndex = 0; // one stop of the tab key; arrows move inside
    grid.scrollLeft = grid.scrollWidth; // the last position is the query
  }

  /** The cells of the rectangle between two, the first one first. */
  function between(start, end) {
    const [[a, b], [c, d]] = [place(start), place(end)];
    const within = (x, from, to) => Math.min(from, to) <= x && x <= Math.max(from, to);
    const others = cells.flat().filter((cell) => {
      const [layer, pos] = place(cell);
      return cell !== start && within(layer, a, c) && within(pos, b, d);
    });
    return [start, ...others];
  }

  function select(selected) {
    for (const cell of cells.flat()) cell.classList.toggle("selected", selected.includes(cell));
  }

  function toggle(start, end) {
    // a change of the component may still be on its way, so the click names it
    const [component, head] = ["component", "head"].map((name) => model.get(name));
    send({ kind: "toggle", cells: between(start, end).map(place), component, head });
    drag = anchor = null;
    select([]);
    end.focus();
  }

  grid.addEventListener("click", (event) => {
    const cell = cellOf(event); // after a drag, the click is on what contains both cells
    if (cell) toggle(cell, cell);
  });
  grid.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "touch" && event.button === 0) drag = cellOf(event); // a finger that moves scrolls
  });
  grid.addEventListener("pointerover", (event) => {
    const cell = cellOf(event);
    if (!cell) return;
    tell(cell);
    if (!drag) return;
    if (!(event.buttons & 1)) drag = null; // released elsewhere
    select(drag && drag !== cell ? between(drag, cell) : []);
  });
  grid.addEventListener("pointerup", (event) => {
    const cell = cellOf(event);
    if (drag && cell && cell !== drag) toggle(drag, cell);
  });
  grid.addEventListener("pointerleave", () => tell(null));
  grid.addEventListener("focusin", (event) => {
    const cell = cellOf(event);
    if (!cell) return;
    grid.querySelector('.cell[tabindex="0"]')?.setAttribute("tabindex", -1);
    cell.setAttribute("tabindex", 0);
    tell(cell);
  });
  grid.addEventListener("keydown", (event) => {
    const cell = cellOf(event);
    if (!cell || event.ctrlKey || event.metaKey || event.altKey) return;
    const [layer, pos] = place(cell);
    const goal = { ArrowUp: [layer + 1, pos], ArrowDown: [layer - 1, pos], ArrowLeft: [layer, pos - 1],
                   ArrowRight: [layer, pos + 1], Home: [layer, 0], End: [layer, cells[0].length - 1] }[event.key];
    if (goal) {
      const next = cells[goal[0]]?.[goal[1]] ?? cell;
      anchor = event.shiftKey ? anchor ?? cell : null;
      select(anchor ? between(anchor, next) : []);
      next.focus();
    } else if (event.key === "Enter" || event.key === " ") toggle(anchor ?? cell, cell);
    else if (event.key === "Escape" && anchor) {
      anchor = null;
      select([]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });

  // ---- what Python computes after the answer to a click ----

  function ask() {
    if (model.still || asked || !visible || !model.get("background").left) return;
    asked = true;
    send({ kind: "more" });
  }

  function answered(message) {
    if (message.kind !== "more") return;
    asked = false;
    ask();
  }

  const share = (cell) => effects[cell.dataset.layer]?.[cell.dataset.pos];
  const nameOf = (cell) => `layer ${cell.dataset.layer}, ${model.get("state").labels[cell.dataset.pos]}`;

  /** Tell the effect of a cell, or without one that of the strongest cell. */
  function tell(cell) {
    const known = cells.flat().filter((each) => Number.isFinite(share(each)));
    const strongest = known.reduce((best, each) => (best && share(best) >= share(each) ? best : each), null);
    if (model.get("background").error) effect.textContent = `no preview: ${model.get("background").error}`;
    else if (cell) effect.textContent = `${nameOf(cell)}, alone: ${Number.isFinite(share(cell)) ? percent(share(cell)) : "not known yet"}`;
    else effect.textContent = strongest ? `strongest: ${nameOf(strongest)}, ${percent(share(strongest))}` : "";
  }

  function updateBackground() {
    const { effects: known, reasons, left } = model.get("background");
    const shown = model.still ? known.length > 0 : model.get("preview");
    effects = cells.map((row) => row.map(() => undefined));
    if (shown) for (const [layer, pos, value] of known) effects[layer][pos] = value;
    for (const cell of cells.flat()) {
      const value = share(cell);
      cell.classList.toggle("known", Number.isFinite(value));
      cell.classList.toggle("negative", value < 0);
      cell.style.setProperty("--share", `${Math.min(100, 100 * Math.abs(value ?? 0)).toFixed(0)}%`);
    }
    progress.hidden = !shown || !left;
    progress.max = cells.length * cells[0].length;
    progress.value = known.length;
    previewed.checked = shown;
    preview.hidden = Boolean(model.still) && !shown;
    ramp.hidden = effect.hidden = !shown;
    tell(cellOf({ target: document.activeElement }));
    updatePatches(reasons);
    updateTitles(reasons);
    ask();
  }

  function updatePatches(reasons) {
    const { sides, side } = model.get("state");
    const focused = patches.contains(document.activeElement) && [...patches.querySelectorAll("button")].indexOf(document.activeElement);
    const lists = Object.entries(sides).map(([name, all]) => {
      const items = joined(all, name === side ? reasons : {}).map(({ words, reason, names }) =>
        make("li", {}, name !== side ? make("span", { className: "chip", textContent: words })
          : make("button", { type: "button", className: reason ? "chip idle" : "chip", title: "take this patch out",
                             "aria-label": `take out: ${words}${reason && `; ${reason}`}`,
                             onclick: () => send({ kind: "remove", names }) },
                 `${words} ×`), reason && name === side ? make("span", { className: "reason", textContent: reason }) : ""));
      const empty = make("li", { textContent: "No patches yet: click a cell to take the clean run's activation there." });
      const list = make("ul", { "aria-label": comparing(sides) ? `patches of ${name}` : "patches" }, ...(items.length ? items : [empty]));
      if (comparing(sides)) list.prepend(make("li", {}, make("b", { textContent: name })));
      list.dataset.side = name;
      return list;
    });
    patches.replaceChildren(...lists);
    if (focused === false) return;
    const buttons = [...patches.querySelectorAll("button")];
    (buttons[Math.min(focused, buttons.length - 1)] ?? grid.querySelector('.cell[tabindex="0"]')).focus();
  }

  const chosenComponent = () => model.get("state").components.find(({ name }) => name === model.get("component"));

  function update() {
    const state = model.get("state");
    const chosen = chosenComponent();
    const headNow = model.get("head");
    for (const kind of ["clean", "corrupted"]) {
      const [number, count] = state.prompts[kind];
      setOptions(prompts[kind], Array.from({ length: count }, (_, i) => [String(i), `prompt ${i}`]), String(number));
    }
    const all = state.sides[state.side];
    const inComponent = (name) => all.filter((p) => p.component === name);
    setOptions(component, state.components.map(({ name }) => [name, counted(name, inComponent(name).length)]), chosen.name);
    headField.hidden = chosen.heads === null;
    const inHead = (i) => inComponent(chosen.name).filter((p) => p.head === i).length;
    const heads = Array.from({ length: chosen.heads ?? 0 }, (_, i) => [String(i), counted(`head ${i}`, inHead(i))]);
    setOptions(head, [["", counted("all heads", inHead(null))], ...heads], headNow === null ? "" : String(headNow));
    // not `disabled`, which would take the focus away from a button that has just been pressed
    for (const [kind, possible] of [["undo", state.can_undo], ["redo", state.can_redo], ["clear", all.length > 0]])
      actions[kind].setAttribute("aria-disabled", !possible);
    compare.setAttribute("aria-pressed", comparing(state.sides));
    for (const side of sides) {
      side.hidden = !comparing(state.sides);
      side.setAttribute("aria-pressed", side.textContent === state.side);
    }
    root.dataset.side = state.side;

    const labels = JSON.stringify([state.n_layers, state.labels]);
    if (grid.dataset.labels !== labels) {
      grid.dataset.labels = labels;
      drawGrid(state);
    }
    metric.textContent = state.metric_name;
    root.classList.toggle("tokens", state.target === null); // their predictions are texts, which have no share
    runs.replaceChildren(
      ...Object.entries(runsOf(state)).map(([name, run]) => {
        const swatch = make("span", { className: "swatch" });
        swatch.style.background = `var(--${name})`;
        const way = (share) => make("td", { className: "way", textContent: "recovered" in run ? percent(share) : "" });
        return make("tr", { "data-run": name },
          make("th", { scope: "row" }, swatch, name),
          make("td", { className: "prediction", textContent: digits(run.prediction) }), way(state.target && run.prediction_recovered),
          make("td", { className: "metric", textContent: digits(run.metric) }), way(run.recovered));
      })
    );
    scale.replaceChildren(numberLine(state, runsOf(state), scale.clientWidth || 480));
    code.textContent = state.code;
    error.textContent = state.error;
  }

  function updateTitles(reasons) {
    const state = model.get("state");
    const [chosen, headNow, all] = [chosenComponent(), model.get("head"), state.sides[state.side]];
    const here = all.filter((p) => p.component === chosen.name && p.head === headNow && p.key === null && p.neuron === null);
    const at = (patches, layer, pos) => patches.filter((p) => p.layer === layer && [pos, null].includes(positionOf(p)));
    const others = all.filter((p) => !here.includes(p));
    const compared = Object.entries(state.sides).find(([name]) => name !== state.side);
    const what = chosen.heads === null ? chosen.name : `${chosen.name}, ${headNow === null ? "all heads" : `head ${headNow}`}`;
    const rows = ["attn_scores", "pattern"].includes(chosen.name);
    cells.forEach((row, layer) =>
      row.forEach((cell, pos) => {
        const [mine, besides] = [at(here, layer, pos), at(others, layer, pos)];
        const inOther = compared ? at(compared[1], layer, pos) : [];
        const idle = mine.map((p) => reasons[p.words]).find(Boolean) ?? "";
        const words = `${what}, layer ${layer}, ${rows ? "query position" : "position"} ${pos}: ${state.labels[pos]}`;
        const also = [idle, besides.length && `patched too: ${besides.map((p) => p.words).join("; ")}`,
                      inOther.length && `in ${compared[0]}: ${inOther.map((p) => p.words).join("; ")}`].filter(Boolean);
        const alone = Number.isFinite(share(cell)) ? `alone: ${percent(share(cell))}` : "";
        cell.title = [words, alone, ...also].filter(Boolean).join("; ");
        cell.setAttribute("aria-label", `patch ${cell.title}`);
        cell.setAttribute("aria-pressed", mine.length > 0);
        cell.classList.toggle("besides", besides.length > 0);
        cell.classList.toggle("idle", mine.length > 0 && idle !== "");
        cell.classList.toggle("compared", inOther.length > 0);
      })
    );
  }

  const heading = (name, className = "") => make("th", { scope: "col", textContent: name, className });
  const table = make("table", { className: "runs", "aria-live": "polite" },
    make("thead", {}, make("tr", {}, heading("run"), heading("prediction"), heading("to clean", "way"), metric, heading("to clean", "way"))), runs);
  const root = make("div", { className: "mechicl-explorer", tabIndex: -1 },
    make("div", { className: "controls" },
      make("label", {}, "clean", prompts.clean), make("label", {}, "corrupted", prompts.corrupted),
      make("label", {}, "component", component), headField,
      make("div", { className: "buttons" }, ...Object.values(actions)),
      make("div", { className: "buttons" }, compare, ...sides),
      make("div", { className: "buttons" }, save, copy)),
    grid,
    preview,
    make("div", { className: "keys", textContent: "Click or Enter patches a cell, dragging or Shift with arrows selects a range, Ctrl+Z undoes, Ctrl+Shift+Z redoes." }),
    patches,
    make("div", { className: "outcome" }, make("div", {}, table, make("div", { className: "keys", textContent: "to clean: share of the way from the corrupted to the clean run" })), scale),
    error,
    details);
  root.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.altKey || event.key.toLowerCase() !== "z") return;
    send({ kind: event.shiftKey ? "redo" : "undo" });
    event.preventDefault();
    event.stopPropagation();
  });
  el.append(root);

  const updateAll = () => {
    update();
    updateBackground();
  };
  const listeners = { "change:state": updateAll, "change:component": updateAll, "change:head": updateAll,
                      "change:background": updateBackground, "change:preview": updateBackground };
  Object.entries(listeners).forEach(([event, listener]) => model.on(event, listener));
  model.on("msg:custom", answered);
  const watcher = new IntersectionObserver(([entry]) => {
    visible = entry.isIntersecting; // nothing is computed for a widget that nobody sees
    ask();
  });
  watcher.observe(root);
  updateAll();
  return () => {
    watcher.disconnect();
    Object.entries(listeners).forEach(([event, listener]) => model.off(event, listener));
    model.off("msg:custom", answered);
  };
}

export default { render };
