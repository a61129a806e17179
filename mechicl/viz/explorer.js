// The widget of explorer.py: it draws `state` and sends clicks; everything is computed in Python.

const SVG = "http://www.w3.org/2000/svg";
const RUNS = ["target", "clean", "corrupted", "patched"];

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

/** A name with the number of patches there. */
function counted(name, n) {
  return n ? `${name} (${n} patched)` : name;
}

function percent(share) {
  return share === null ? "–" : `${(100 * share).toFixed(1)} %`;
}

function drawn(tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
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

/** A number line with a mark for each run; the names stand where there is room for them. */
function numberLine({ title, points }) {
  const known = RUNS.filter((name) => Number.isFinite(points[name]));
  const svg = drawn("svg", { viewBox: "0 0 480 92", role: "img", "aria-label": `number line of the ${title}` });
  svg.append(drawn("text", { x: 0, y: 10 }, title));
  if (!known.length) return svg;
  const values = known.map((name) => points[name]);
  const middle = (Math.min(...values) + Math.max(...values)) / 2;
  const half = (Math.max(...values) - Math.min(...values)) / 2 || Math.abs(middle) || 1;
  const place = (value) => 240 + (205 * (value - middle)) / half;
  svg.append(drawn("line", { x1: 10, x2: 470, y1: 52, y2: 52, stroke: "currentColor", "stroke-opacity": 0.35 }));
  for (const value of [middle - half, middle, middle + half]) {
    const x = place(value);
    svg.append(drawn("line", { x1: x, x2: x, y1: 48, y2: 56, stroke: "currentColor", "stroke-opacity": 0.35 }));
    svg.append(drawn("text", { x, y: 86, "text-anchor": "middle" }, Number(value.toPrecision(3)).toString()));
  }
  for (const name of known) {
    const x = place(points[name]);
    const color = `var(--${name})`;
    const mark =
      name === "target"
        ? drawn("line", { x1: x, x2: x, y1: 36, y2: 68, stroke: color, "stroke-width": 2, "stroke-dasharray": "3 2" })
        : drawn("circle", { cx: x, cy: 52, r: name === "patched" ? 6 : 8, fill: name === "patched" ? color : "none",
                            stroke: color, "stroke-width": 2.5 });
    mark.append(drawn("title", {}, `${name}: ${points[name]}`));
    mark.dataset.run = name;
    svg.append(mark);
  }
  // Names, each in the lowest row where it meets no other.
  const rows = [[], []];
  for (const name of [...known].reverse()) {
    const x = place(points[name]);
    const row = rows.findIndex((taken) => taken.every((other) => Math.abs(other - x) > 62));
    if (row < 0) continue;
    rows[row].push(x);
    const label = drawn("text", { x, y: 34 - 12 * row, "text-anchor": "middle" }, name);
    label.style.fill = `var(--${name})`;
    svg.append(label);
  }
  return svg;
}

function render({ model, el }) {
  const send = (message) => model.send(message);
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
      model.set("component", e.target.value);
      model.save_changes();
    },
  });
  const head = make("select", {
    "aria-label": "head",
    onchange: (e) => {
      model.set("head", e.target.value === "" ? null : Number(e.target.value));
      model.save_changes();
    },
  });
  const headField = make("label", {}, "head", head);
  const buttons = Object.fromEntries(
    ["undo", "redo", "clear"].map((kind) => [
      kind,
      make("button", { type: "button", textContent: kind, "data-action": kind, onclick: () => send({ kind }) }),
    ])
  );
  const answer = make("span", { className: "answer" });
  const grid = make("div", { className: "grid" });
  const runs = make("tbody");
  const metric = make("th", { scope: "col" });
  const shares = make("tr", { className: "recovered" });
  const scale = make("div", { className: "scale" });
  const patches = make("ul", { className: "patches", "aria-label": "patches" });
  const code = make("pre", { tabIndex: 0, "aria-label": "code of these patches" });
  const copy = make("button", {
    type: "button",
    className: "copy",
    textContent: "copy",
    onclick: async () => {
      try {
        await navigator.clipboard.writeText(code.textContent);
        copy.textContent = "copied";
      } catch {
        getSelection().selectAllChildren(code);
        copy.textContent = "selected";
      }
      setTimeout(() => (copy.textContent = "copy"), 1500);
    },
  });
  const error = make("div", { className: "error", role: "alert" });
  let cells = [];

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
    (current || cells[0][0]).tabIndex = 0; // one stop of the tab key; arrows move inside
  }

  grid.addEventListener("click", (event) => {
    const cell = event.target.closest(".cell");
    if (cell) send({ kind: "toggle", layer: Number(cell.dataset.layer), pos: Number(cell.dataset.pos) });
  });
  grid.addEventListener("focusin", (event) => {
    grid.querySelector('.cell[tabindex="0"]')?.setAttribute("tabindex", -1);
    event.target.closest(".cell")?.setAttribute("tabindex", 0);
  });
  grid.addEventListener("keydown", (event) => {
    const step = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    const cell = event.target.closest(".cell");
    if (!step || !cell) return;
    event.preventDefault();
    event.stopPropagation();
    cells[Number(cell.dataset.layer) + step[0]]?.[Number(cell.dataset.pos) + step[1]]?.focus();
  });

  function update() {
    const state = model.get("state");
    const chosen = state.components.find(({ name }) => name === model.get("component"));
    const headNow = model.get("head");
    for (const kind of ["clean", "corrupted"]) {
      const [number, count] = state.prompts[kind];
      setOptions(prompts[kind], Array.from({ length: count }, (_, i) => [String(i), `prompt ${i}`]), String(number));
    }
    const all = state.interventions;
    const inComponent = (name) => all.filter((p) => p.component === name);
    setOptions(component, state.components.map(({ name }) => [name, counted(name, inComponent(name).length)]), chosen.name);
    headField.hidden = chosen.heads === null;
    headField.style.display = headField.hidden ? "none" : "";
    const inHead = (i) => inComponent(chosen.name).filter((p) => p.head === i).length;
    const heads = Array.from({ length: chosen.heads ?? 0 }, (_, i) => [String(i), counted(`head ${i}`, inHead(i))]);
    setOptions(head, [["", counted("all heads", inHead(null))], ...heads], headNow === null ? "" : String(headNow));
    buttons.undo.disabled = !state.can_undo;
    buttons.redo.disabled = !state.can_redo;
    buttons.clear.disabled = !all.length;
    const seconds = model.get("last_seconds");
    answer.textContent = seconds ? `answered in ${(1000 * seconds).toFixed(0)} ms` : "";

    const labels = JSON.stringify([state.n_layers, state.labels]);
    if (grid.dataset.labels !== labels) {
      grid.dataset.labels = labels;
      drawGrid(state);
    }
    const here = all.filter((p) => p.component === chosen.name && p.head === headNow && p.whole);
    const at = (patches, layer, pos) => patches.filter((p) => p.layer === layer && (p.pos === pos || p.pos === null));
    const others = all.filter((p) => !here.includes(p));
    const what = chosen.heads === null ? chosen.name : `${chosen.name}, ${headNow === null ? "all heads" : `head ${headNow}`}`;
    cells.forEach((row, layer) =>
      row.forEach((cell, pos) => {
        const words = `${what}, layer ${layer}, ${chosen.along === "query" ? "query position" : "position"} ${pos}: ${state.labels[pos]}`;
        const besides = at(others, layer, pos).map((p) => p.words);
        const also = besides.length ? `; patched too: ${besides.join("; ")}` : "";
        cell.title = `${words}${also}`;
        cell.setAttribute("aria-label", `patch ${words}${also}`);
        cell.setAttribute("aria-pressed", at(here, layer, pos).length > 0);
        cell.classList.toggle("besides", besides.length > 0);
      })
    );

    metric.textContent = state.metric_name;
    runs.replaceChildren(
      ...state.runs.map(({ name, prediction, metric: value }) => {
        const swatch = make("span", { className: "swatch" });
        swatch.style.background = `var(--${name})`;
        return make("tr", { "data-run": name },
          make("th", { scope: "row" }, swatch, name),
          make("td", { className: "prediction", textContent: prediction }),
          make("td", { className: "metric", textContent: value }));
      })
    );
    const { prediction: moved, metric: gained } = state.recovered;
    shares.replaceChildren(
      make("th", { scope: "row", textContent: "of the way from corrupted to clean" }),
      make("td", { className: "prediction", textContent: percent(moved) }),
      make("td", { className: "metric", textContent: percent(gained) }));
    scale.replaceChildren(numberLine(state.scale));

    const list = all.map(({ words }, index) =>
      make("li", {}, make("button", { type: "button", title: "take this patch out", "aria-label": `take out: ${words}`,
                                      textContent: `${words} ×`, onclick: () => send({ kind: "remove", index }) })));
    patches.replaceChildren(...(list.length ? list : [make("li", { textContent: "No patches yet: click a cell to take the clean run's activation there." })]));
    if (others.length) patches.append(make("li", { textContent: "Filled: patches of what is selected above; outlined: others." }));
    code.textContent = state.code;
    error.textContent = state.error;
  }

  const table = make("table", { className: "runs", "aria-live": "polite" },
    make("thead", {}, make("tr", {}, make("th", { scope: "col", textContent: "run" }),
      make("th", { scope: "col", textContent: "prediction" }), metric)), runs, make("tfoot", {}, shares));
  el.append(make("div", { className: "mechicl-explorer" },
    make("div", { className: "controls" },
      make("label", {}, "clean", prompts.clean), make("label", {}, "corrupted", prompts.corrupted),
      make("label", {}, "component", component), headField,
      make("div", { className: "buttons" }, ...Object.values(buttons)), answer),
    grid,
    patches,
    make("div", { className: "outcome" }, table, scale),
    error,
    make("details", {}, make("summary", { textContent: "code" }), make("div", { className: "code" }, copy, code))));

  const events = ["change:state", "change:component", "change:head", "change:last_seconds"];
  events.forEach((event) => model.on(event, update));
  update();
  return () => events.forEach((event) => model.off(event, update));
}

export default { render };
