// Draws FIGURES at the width of the page: where a panel would be narrower than LEAST pixels, the panels of a figure are
// arranged in fewer columns; on narrow pages legends and colour bars move below, and long labels are broken into lines.
const LEAST = 245, NARROW = 760, LETTER = 6.8, LINE = 17;

const plain = (text) => String(text ?? "").replaceAll("<br>", " ").replace(/<[^>]*>/g, "").replace(/&#?\w+;/g, "x");
const numberOfLines = (text) => (text ? text.split("<br>").length : 0);

function broken(text, width) { // into lines of a width in pixels
  const lines = [];
  for (const part of String(text ?? "").split("<br>")) {
    lines.push("");
    for (const word of part.split(" ")) {
      const longer = `${lines.at(-1)} ${word}`.trim();
      if (lines.at(-1) && plain(longer).length * LETTER > width) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
  }
  return lines.join("<br>");
}

const titleOf = (axis) => (typeof axis?.title === "string" ? axis.title : axis?.title?.text) ?? "";
const retitle = (axis, text) => { axis.title = { ...(typeof axis.title === "object" ? axis.title : {}), text }; };

function panelsOf(layout, data) { // in reading order; those without traces are removed
  const used = new Set(data.map((trace) => (trace.xaxis ?? "x").replace("x", "xaxis")));
  for (const key of Object.keys(layout).filter((key) => /^xaxis\d+$/.test(key) && !used.has(key))) {
    delete layout[layout[key].anchor?.replace("y", "yaxis")];
    delete layout[key];
  }
  const keys = Object.keys(layout).filter((key) => /^xaxis\d*$/.test(key));
  const panels = (keys.length ? keys : ["xaxis"]).map((key) => {
    const x = (layout[key] ??= {}), anchor = (x.anchor ?? "y").replace("y", "yaxis");
    const y = (layout[anchor] ??= {});
    return { x, y, name: key.replace("axis", ""), left: x.domain ?? [0, 1], up: y.domain ?? [0, 1] };
  });
  return panels.sort((a, b) => b.up[1] - a.up[1] || a.left[0] - b.left[0]);
}

function labels(data, panel, letter) { // texts at the ticks of an axis of names
  const axis = panel[letter];
  if (axis.ticktext) return axis.ticktext;
  const own = data.filter((trace) => (trace.xaxis ?? "x") === panel.name);
  return own.flatMap((trace) => [...(trace[letter] ?? [])]).filter((value) => typeof value === "string");
}

const longest = (texts) => Math.max(0, ...texts.map((text) => plain(text).length)) * LETTER;

function fitted(figure, room, first) {
  const width = Math.max(room, figure.layout.meta?.least ?? 0); // pixels that a drawing needs: it scrolls
  const layout = structuredClone(figure.layout), data = figure.data.map((trace) => ({ ...trace }));
  const margin = { l: 80, r: 80, t: 100, b: 80, ...layout.margin }, height = layout.height ?? 450;
  const panels = panelsOf(layout, data), narrow = width < NARROW;
  const inner = (layout.width ?? width) - margin.l - margin.r;
  const narrowest = Math.min(...panels.map(({ left }) => (left[1] - left[0]) * inner));
  if (!narrow && narrowest >= LEAST && (layout.width ?? 0) <= room) return { data, layout };

  // columns
  if (width > room) layout.width = width;
  else delete layout.width;
  const scales = new Map(); // those with a colour bar, and the last panel that uses them
  for (const trace of data) {
    const owner = trace.coloraxis ? layout[trace.coloraxis] : trace;
    if (owner?.colorbar && owner.showscale !== false) scales.set(owner, panels.find(({ name }) => name === (trace.xaxis ?? "x")));
  }
  const bars = new Map([...scales].map(([owner, panel]) => [scales.size > 1 ? panel : panels.at(-1), owner]));
  const named = panels.map((panel) => longest(labels(data, panel, "y")));
  const inside = panels.map((panel, i) => named[i] > 0.25 * width
    && !data.some((trace) => trace.type === "heatmap" && (trace.xaxis ?? "x") === panel.name));
  const bare = panels.every(({ y }, i) => inside[i] && !titleOf(y));
  const side = bare ? 12 : 20 + Math.max(42, ...named.map((size, i) => (inside[i] ? 0 : Math.min(size, 0.25 * width))));
  const second = Object.values(layout).some((axis) => axis?.overlaying) ? 44 : 0;
  const across = width - side - 8 - second;
  const columns = new Set(panels.map(({ left }) => left[0].toFixed(3))).size;
  let k = Math.max(1, Math.min(columns, Math.floor((across + side) / (LEAST + side))));
  const rows = Math.ceil(panels.length / k);
  k = Math.ceil(panels.length / rows);
  const wide = (across - (k - 1) * side) / k;

  // texts
  layout.font = { ...layout.font, size: 12 };
  layout.annotations ??= [];
  const title = broken(titleOf(layout), (room - 20) * 0.85);
  layout.title = { ...layout.title, text: title, font: { size: 15 }, x: 0, xref: "container", y: 1, yref: "container", yanchor: "top", pad: { t: 12, l: 4 } };
  const notes = layout.annotations.filter((note) => note.xref === "paper" && note.yref === "paper");
  const home = new Map(notes.map((note) => {
    const away = ({ left, up }) => Math.max(left[0] - note.x, note.x - left[1], 0) + Math.max(up[0] - note.y, note.y - up[1], 0);
    return [note, panels.reduce((best, panel) => (away(panel) < away(best) ? panel : best))];
  }));
  notes.forEach((note) => { note.text = broken(note.text, wide); });
  const above = (panel) => LINE * Math.max(0, ...notes.filter((note) => home.get(note) === panel && note.yanchor === "bottom")
    .map((note) => numberOfLines(note.text)));
  const high = panels.map((panel, i) => {
    const { x, y, up } = panel, long = inside[i] && named[i] > wide;
    let own = Math.max((height - margin.t - margin.b) * (up[1] - up[0]), 60) * (long ? 1.8 : inside[i] ? 1.35 : 1) * (first && room < 600 ? 0.65 : 1);
    retitle(x, broken(titleOf(x), wide));
    retitle(y, broken(titleOf(y), own * 0.95));
    for (const axis of [x, y]) if (axis.matches || axis.showticklabels === false) axis.showticklabels = true;
    if (x.type === "log" && !x.ticktext) Object.assign(x, { tickmode: "auto", nticks: Math.floor(wide / 60), tickangle: 0 });
    const names = y.ticktext ?? [...new Set(labels(data, panel, "y"))];
    if (!inside[i] && named[i] > 0.25 * width) {
      own = Math.max(own, 2 * LINE * names.length);
      const ticktext = names.map((name) => broken(name, 0.25 * width));
      Object.assign(y, { tickmode: "array", tickvals: y.ticktext ? y.tickvals : names, ticktext });
    }
    if (inside[i]) {
      Object.assign(y, { showticklabels: false, ticks: "" });
      const [across, along] = [x.anchor ? panel.name : "x", (x.anchor ?? "y")];
      const texts = names.map((name) => broken(name, wide * 1.1)); // in smaller letters
      own = Math.max(own, names.length * (16 + 15 * Math.max(...texts.map(numberOfLines)))); // under the mark above
      names.forEach((name, j) => layout.annotations.push({
        xref: `${across} domain`, x: 0, xanchor: "left", yref: along, y: name, yanchor: "bottom", yshift: 4, align: "left",
        text: texts[j], showarrow: false, borderpad: 0, font: { size: 11 }, bgcolor: "rgba(255,255,255,0.8)",
      }));
    }
    return own;
  });
  const below = panels.map((panel, i) => {
    const square = panel.x.scaleanchor || panel.y.scaleanchor;
    const names = panel.x.ticktext ?? [...new Set(labels(data, panel, "x"))], slot = (square ? Math.min(wide, high[i]) : wide) / Math.max(1, names.length) - 6;
    const lines = names.map((name) => broken(name, slot)), places = panel.x.ticktext ? panel.x.tickvals : names, tall = Math.max(1, ...lines.map(numberOfLines));
    const turned = longest(lines.flatMap((name) => name.split("<br>"))) > slot;
    if (names.length && !turned) {
      panel.x.tickangle = 0;
      if (tall > 1) Object.assign(panel.x, { tickmode: "array", tickvals: places, ticktext: lines });
    } else if (turned && slot < 9) { // every few of many ticks, with the last
      const some = (texts) => texts.filter((_, j) => (texts.length - 1 - j) % Math.ceil(15 / (slot + 6)) === 0);
      Object.assign(panel.x, { tickmode: "array", tickvals: some(places), ticktext: some(names) });
    }
    const title = numberOfLines(titleOf(panel.x));
    panel.under = 28 + (turned ? Math.min(0.9 * longest(names), 120) : LINE * (tall - 1)) + (title ? 12 + LINE * title : 0);
    return panel.under + (bars.has(panel) ? 76 : 0);
  });

  // margins are those computed here: plotly's own take many redraws
  for (const [key, axis] of Object.entries(layout)) if (/^[xy]axis/.test(key)) axis.automargin = false;

  // rows
  const at = (row) => panels.map((_, i) => i).filter((i) => Math.floor(i / k) === row);
  const most = (row, values) => Math.max(...at(row).map((i) => values[i]));
  const over = panels.map(above);
  const top = 10 + (title ? 14 + 20 * numberOfLines(title) : 0) + most(0, over);
  let plot = 0;
  const tops = [];
  for (let row = 0; row < rows; row++) {
    if (row) plot += most(row - 1, below) + most(row, over) + 10;
    tops.push(plot);
    plot += most(row, high);
  }
  panels.forEach((panel, i) => {
    const start = (i % k) * (wide + side), end = plot - tops[Math.floor(i / k)];
    panel.x.domain = [start / across, Math.min(1, (start + wide) / across)];
    panel.y.domain = [Math.max(0, (end - high[i]) / plot), end / plot];
    const owner = bars.get(panel);
    if (owner) owner.colorbar = {
      ...owner.colorbar, orientation: "h", thickness: 10, lenmode: "fraction", len: wide / across, xanchor: "center",
      x: (start + wide / 2) / across, yanchor: "top", y: panel.y.domain[0] - panel.under / plot,
      title: { text: plain(owner.colorbar.title?.text ?? owner.colorbar.title), side: "top" }, nticks: 5,
    };
  });
  for (const note of notes) {
    const { x, y, left, up } = home.get(note), within = (value, [from, to]) => (value - from) / (to - from);
    const along = (share, [from, to]) => from + share * (to - from);
    note.x = along(Math.min(1, Math.max(0, within(note.x, left))), x.domain);
    note.y = note.yanchor === "bottom" ? y.domain[1] : along(within(note.y, up), y.domain);
  }

  // legend
  let bottom = most(rows - 1, below);
  const entries = data.filter((trace) => trace.name && trace.showlegend !== false && trace.type !== "heatmap");
  if (layout.showlegend !== false && (entries.length > 1 || entries.some((trace) => trace.showlegend))) {
    entries.forEach((trace) => { trace.name = broken(trace.name, width - 70); });
    const widths = entries.map((trace) => 52 + longest(trace.name.split("<br>").map(plain)));
    const total = widths.reduce((a, b) => a + b), one = Math.max(...widths);
    const needed = total < width ? 1 : Math.ceil(entries.length / Math.max(1, Math.floor(width / one)));
    layout.legend = { ...layout.legend, orientation: "h", x: -side / across, xanchor: "left", y: -(bottom + 6) / plot, yanchor: "top" };
    bottom += (first ? 6 : 14) + needed * 20 * Math.max(...entries.map((trace) => numberOfLines(trace.name)));
  }
  layout.margin = { l: side, r: 8 + second, t: top, b: bottom + 6 };
  layout.height = top + plot + bottom + 6;
  return { data, layout };
}

const places = FIGURES.map((_, i) => document.getElementById(`figure${i}`));
const touch = matchMedia("(hover: none)").matches;

function drawAll() {
  places.forEach((place, i) => {
    const width = place.clientWidth;
    if (!width || place.dataset.width === String(width)) return; // folded, or drawn at this width
    place.dataset.width = width;
    const { data, layout } = fitted(FIGURES[i], width, place.closest("#opening") !== null);
    if (!place.classList.contains("js-plotly-plot")) place.replaceChildren(); // the still picture
    place.style.height = `${layout.height ?? 450}px`;
    Plotly.react(place, data, layout, { displaylogo: false, responsive: true, displayModeBar: touch ? false : "hover" });
  });
}

drawAll();
addEventListener("resize", drawAll);
document.addEventListener("toggle", drawAll, true);
