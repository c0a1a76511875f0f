"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const narrow = matchMedia("(max-width: 40rem)");
const MARGIN = 9; // left of a matrix, for the marker of the row
const SPEEDS = [1, 2, 4, 8, 16, 30, 60];
const number = new Intl.NumberFormat("en-US");
const byId = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const drawn = ["svg", "rect", "line", "path"].includes(tag);
  const node = drawn ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

const isNumber = (value) => typeof value === "number";
const shown = (value) => (isNumber(value) ? value.toPrecision(6) : String(value).replace("-inf", "−∞"));
const range = ([low, high]) => (low === high ? `${low}` : `${low} to ${high}`);

// --- a matrix as a grid ----------------------------------------------------------------------------------------------

// `across`: drawn with its rows from left to right, as keys lie in S.
function grid(matrix, unit, marked, caption) {
  const across = Boolean(matrix.across);
  const [rows, columns, tall, wide] = across ? [matrix.columns, matrix.rows, matrix.wide, matrix.tall]
    : [matrix.rows, matrix.columns, matrix.tall, matrix.wide];
  const width = Math.max(columns * unit, 8), height = Math.max(rows * unit, 8);
  const x = (column) => MARGIN + (column / columns) * width, y = (row) => 1 + (row / rows) * height;
  const svg = make("svg", { width: width + MARGIN + 2, height: height + 2, role: "img" });
  const under = make("svg"), over = make("svg");
  svg.append(make("rect", { class: "whole", x: MARGIN, y: 1, width, height }), under);
  for (let row = tall; row < rows; row += tall)
    svg.append(make("line", { class: "tiling", x1: MARGIN, x2: MARGIN + width, y1: y(row), y2: y(row) }));
  for (let column = wide; column < columns; column += wide)
    svg.append(make("line", { class: "tiling", x1: x(column), x2: x(column), y1: 1, y2: 1 + height }));
  svg.append(over);
  if (marked !== null && marked < rows) {
    const middle = y(marked + 0.5);
    svg.append(make("path", { class: "marker", d: `M0 ${middle - 4} L${MARGIN - 1} ${middle} L0 ${middle + 4} Z` }));
  }
  const note = make("span", {}, caption), name = matrix.name + (across ? "ᵀ" : "");
  const figure = make("figure", { "data-array": matrix.name, class: across ? "across" : "" }, svg,
    make("figcaption", {}, make("b", {}, name), note));
  function box(at, kind) {
    const [top, bottom, left, right] = across ? [at[2], at[3], at[0], at[1]] : at;
    const inset = kind === "write" ? 1 : 0;
    return make("rect", {
      class: kind, "data-box": at.join(), x: x(left) + inset, y: y(top) + inset,
      width: Math.max(x(right + 1) - x(left) - 2 * inset, 1), height: Math.max(y(bottom + 1) - y(top) - 2 * inset, 1),
    });
  }
  return {
    figure,
    lay(boxes) { under.replaceChildren(...boxes.map((at) => box(at, "visited"))); },
    light(touches, says = "") {
      const words = touches.map((touch) => `${touch.kind} ${number.format(touch.accesses)}`).join(", ");
      const kinds = { read: ["read"], written: ["write"], updated: ["read", "write"] };
      over.replaceChildren(...touches.flatMap((touch) => kinds[touch.kind].map((kind) => box(touch.box, kind))));
      note.textContent = says || words || caption;
      svg.setAttribute("aria-label", `${name}, ${rows} by ${columns}: ${words || "not touched"}`);
    },
  };
}

// --- numbers as bars -------------------------------------------------------------------------------------------------

function strip(name, length, top) {
  const width = Math.min(Math.max(length * 6, 60), 260), height = 44;
  const svg = make("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const title = make("span", {}, name);
  const node = make("div", { "data-strip": name }, title, svg);
  return {
    node,
    draw(values, label) {
      title.textContent = label;
      const negative = values.some((value) => isNumber(value) && value < 0);
      const zero = negative ? height / 2 : height - 1, scale = (negative ? height / 2 - 1 : height - 2) / (top || 1);
      const bars = values.map((value, at) => {
        if (!isNumber(value)) return null;
        const size = Math.max(Math.abs(value) * scale, 0.5);
        return make("rect", { class: "bar", x: (at * width) / length + 0.5, width: Math.max(width / length - 1, 1),
          y: value < 0 ? zero : zero - size, height: size });
      });
      svg.replaceChildren(make("line", { class: "axis", x1: 0, x2: width, y1: zero, y2: zero }), ...bars.filter(Boolean));
      svg.setAttribute("aria-label", `${label}: ${values.map(shown).join(", ")}`);
    },
  };
}

// --- what is on the chip ---------------------------------------------------------------------------------------------

// For each frame: matrix in HBM -> boxes of it that were copied to the chip and are still in use there.
function heldOf(play) {
  let held = {}, block = "";
  return play.frames.map((frame) => {
    const arrays = play.kernels[frame.launch].arrays, now = `${frame.launch}:${frame.block}`;
    held = now === block ? { ...held } : {};
    block = now;
    const copies = frame.touches.some((touch) => touch.kind === "written" && arrays[touch.array].space !== "global");
    for (const touch of frame.touches.filter((one) => arrays[one.array].space === "global")) {
      const { name } = arrays[touch.array];
      if (touch.kind !== "read") delete held[name];
      else if (copies) held[name] = [touch.box];
    }
    return held;
  });
}

// For each frame: array on the chip -> the box of what its block has written to it so far.
function filledOf(play) {
  let filled = {}, block = "";
  return play.frames.map((frame) => {
    const arrays = play.kernels[frame.launch].arrays, now = `${frame.launch}:${frame.block}`;
    filled = now === block ? { ...filled } : {};
    block = now;
    for (const { array, kind, box } of frame.touches) {
      if (kind === "read" || arrays[array].space === "global") continue;
      const before = filled[array] || box;
      filled[array] = box.map((end, at) => (at % 2 ? Math.max(end, before[at]) : Math.min(end, before[at])));
    }
    return filled;
  });
}

// --- one stage -------------------------------------------------------------------------------------------------------

function statesOf(play) {
  let state = {};
  return play.frames.map((frame) => {
    state = { ...state };
    if (frame.row.S_ij && "0" in frame.row.S_ij) delete state.P_ij; // a new tile
    for (const [name, value] of Object.entries(frame.row)) {
      const fresh = name.endsWith("_ij") && "0" in value;
      state[name] = typeof value === "object" ? { ...(fresh ? {} : state[name]), ...value } : value;
    }
    return state;
  });
}

function largest(states, name) {
  const all = states.flatMap((state) => Object.values(state[name] || {})).filter(isNumber);
  return all.reduce((most, value) => Math.max(most, Math.abs(value)), 0);
}

function stage(play, at) {
  const squares = Math.max(1, play.matrices.filter((matrix) => "SP".includes(matrix.name)).length);
  const unit = Math.min(2.5, (narrow.matches ? 150 : 250) / (squares * play.n + 2 * play.d));
  const says = make("p", { class: "says" }), where = make("p", { class: "where" }), moves = make("p", { class: "moves" });
  const card = (title, ...parts) => {
    const id = `card-${at}-${title.replace(/\W+/g, "")}`;
    return make("section", { class: "card", "aria-labelledby": id }, make("h3", { id }, title), ...parts);
  };

  const matrices = play.matrices.map((matrix) =>
    [matrix.name, grid({ ...matrix, across: "KV".includes(matrix.name) }, unit,
      "QSPO".includes(matrix.name) ? play.row : null, "\u00a0")]);
  let scores = null;
  if (play.chip) {
    scores = grid({ name: "S", rows: play.n, columns: play.n, tall: play.sides[0], wide: play.sides[1] }, unit, play.row, "");
    scores.figure.classList.add("never");
    scores.figure.setAttribute("data-array", "scores");
  }
  const side = (names) => matrices.filter(([name]) => names.includes(name)).map(([, drawn]) => drawn.figure);
  const cells = [...side("Q"), ...(scores ? [scores.figure] : []), ...side("SPOlmL")];
  const hbm = make("div", { class: "hbm", style: `grid-template-columns: repeat(${cells.length}, max-content)` },
    ...side("KV"), ...cells);

  const chips = play.kernels.map((kernel) => kernel.arrays.map((array) => {
    const what = array.space === "shared" ? `shared, ${number.format(array.bytes)}\u00a0B` : "registers";
    return array.space === "global" ? null : grid({ ...array, tall: 1e9, wide: 1e9 }, unit, null, what);
  }));
  const chip = make("div", { class: "figures" });
  const gauge = make("div", { class: "gauge", role: "img" }), inUse = make("p", { class: "numbers" });
  const loads = make("span", { class: "loads" }), stores = make("span", { class: "stores" });
  const ideal = make("span", { class: "ideal", style: `left: calc(${(100 * play.ideal) / data.scale}% - 3px)` });
  const meter = make("div", { class: "gauge", role: "img" }, loads, stores, ideal);
  const moved = make("p", { class: "numbers" });

  const states = statesOf(play), held = heldOf(play), filled = filledOf(play);
  const values = make("dl", { class: "values" }), strips = make("div", { class: "strips" });
  const scalars = ["m", "l", "L"].filter((name) => states.some((state) => name in state)).map((name) => {
    const value = make("dd", { "data-value": "" }, "–");
    values.append(make("div", { "data-name": name }, make("dt", {}, name), value));
    return [name, value];
  });
  const lists = ["S", "S_ij", "P", "P_ij", "O"].filter((name) => states.some((state) => name in state)).map((name) => {
    const length = Math.max(...states.map((state) => Object.keys(state[name] || {}).length));
    const drawn = strip(name, length, largest(states, name));
    const list = make("p", { class: "list", "data-list": name });
    strips.append(drawn.node);
    return [name, drawn, list];
  });
  const allNumbers = make("details", {}, make("summary", {}, "All numbers of the row"), ...lists.map(([, , list]) => list));

  const algorithm = play.algorithm.lines.map((line) => {
    const indent = line.text.length - line.text.trimStart().length;
    return make("li", { "data-number": line.number ?? "" }, make("span", { class: "number" }, `${line.number ?? "–"}`),
      make("span", { style: `padding-left: ${indent / 4}em` }, line.text.trim()));
  });
  const sources = play.kernels.map((kernel) => {
    const lines = kernel.source.map((text, n) => make("code", { "data-line": kernel.first + n },
      make("span", { class: "number" }, `${kernel.first + n}`), `${text}\n`));
    const pre = make("pre", { tabindex: 0, role: "region", "aria-label": `Source of kernel ${kernel.name}` }, ...lines);
    return { pre, lines };
  });
  const title = make("h3", { id: `source-${at}` });

  const node = make("section", { class: "play", "data-stage": play.stage, "aria-labelledby": `stage-${at}` },
    make("h2", { id: `stage-${at}` }, `${play.stage} `, make("small", {}, play.facts)), where, says, moves,
    make("div", { class: "pair" }, card("HBM", hbm), card("On the chip", chip, gauge, inUse)),
    card("Traffic to and from HBM so far", meter, moved),
    card(`Row ${play.row}: as the kernel has it`, values, strips, allNumbers),
    make("section", { class: "card", "aria-labelledby": `algorithm-${at}` },
      make("h3", { id: `algorithm-${at}` }, make("a", { href: play.algorithm.link }, play.algorithm.name), ", in our words"),
      make("ol", { class: "algorithm" }, ...algorithm)),
    make("section", { class: "card", "aria-labelledby": `source-${at}` }, title, ...sources.map((one) => one.pre)));

  let kernelShown = -1;
  function show(step) {
    const last = play.frames.length - 1, now = Math.min(step, last), frame = play.frames[now];
    const kernel = play.kernels[frame.launch];
    const turns = Object.entries(frame.turns).map(([name, values]) => `, ${name} = ${range(values)}`).join("");
    where.textContent = `Step ${now + 1} of ${last + 1}${step > last ? ", finished" : ""}: kernel ${kernel.name}, `
      + `block (${frame.block.join(", ")}), after ${frame.phase} ${frame.phase === 1 ? "barrier" : "barriers"}${turns}`;
    const lines = frame.algorithm.map((n) => play.algorithm.lines[n]);
    says.replaceChildren(...lines.map((line) => make("b", { "data-number": line.number ?? "" }, line.text.trim())));
    if (!lines.length) says.textContent = "Each thread finds its place: which head, which row.";
    moves.textContent = frame.says;

    const touched = (name) => frame.touches.filter((touch) => kernel.arrays[touch.array].name === name);
    for (const [name, drawn] of matrices) {
      drawn.lay(held[now][name] || []);
      drawn.light(touched(name).filter((touch) => kernel.arrays[touch.array].space === "global"));
    }
    if (scores) {
      const visited = play.frames.slice(0, now + 1).map((one) => one.scores).filter(Boolean);
      const distinct = [...new Map(visited.map((box) => [box.join(), box])).values()];
      scores.lay(distinct);
      const live = frame.scores ? touched("S_ij").map((touch) => ({ ...touch, box: frame.scores })) : [];
      scores.light(live, `on chip only, never in HBM; tiles so far: ${distinct.length}`);
    }
    if (kernelShown !== frame.launch) {
      kernelShown = frame.launch;
      chip.replaceChildren(...chips[frame.launch].filter(Boolean).map((drawn) => drawn.figure));
      if (!chip.childNodes.length) chip.append("this kernel keeps no tiles on the chip");
      sources.forEach((one, n) => { one.pre.hidden = n !== frame.launch; });
      title.textContent = `The kernel: ${kernel.name}`;
      gauge.replaceChildren(...kernel.arrays.filter((array) => array.space === "shared").map((array) =>
        make("span", { class: "part", style: `width: ${(100 * array.bytes) / data.sram}%` }, make("i"))));
    }
    const shared = kernel.arrays.filter((array) => array.space === "shared");
    kernel.arrays.forEach((array, n) => {
      if (array.space === "global") return;
      const drawn = chips[frame.launch][n];
      drawn.lay(filled[now][n] ? [filled[now][n]] : []);
      drawn.light(frame.touches.filter((touch) => touch.array === n));
    });
    shared.forEach((array, n) => {
      const share = (100 * frame.filled[array.name]) / (array.rows * array.columns);
      gauge.children[n].firstChild.style.width = `${share}%`;
    });
    const bytes = shared.reduce((sum, array) => sum + array.bytes, 0);
    const parts = shared.map((array) => `${array.name} ${number.format(array.bytes)}`).join(" + ");
    inUse.textContent = `Shared memory (SRAM): ${number.format(bytes)} of ${number.format(data.sram)} B`
      + (parts ? `: ${parts}` : "");
    gauge.setAttribute("aria-label", inUse.textContent);

    loads.style.width = `${(100 * frame.read) / data.scale}%`;
    stores.style.width = `${(100 * frame.written) / data.scale}%`;
    const elements = (frame.read + frame.written) / play.itemsize, all = (play.read + play.written) / play.itemsize;
    moved.replaceChildren("read ", make("b", { "data-read": frame.read }, number.format(frame.read)), " B, written ",
      make("b", { "data-written": frame.written }, number.format(frame.written)), ` B: ${number.format(elements)} of `
      + `${number.format(all)} elements. The black mark: Algorithm 0, ${number.format(play.ideal / play.itemsize)}.`
        .replace("black", byId("theme").textContent.startsWith("Dark") ? "black" : "white"));
    meter.setAttribute("aria-label", moved.textContent);

    const state = states[now];
    for (const [name, value] of scalars) {
      value.textContent = name in state ? shown(state[name]) : "–";
      value.setAttribute("data-value", name in state ? state[name] : "");
    }
    for (const [name, drawn, list] of lists) {
      const there = state[name] || {}, keys = Object.keys(there).map(Number).sort((a, b) => a - b);
      const row = keys.map((key) => there[key]);
      drawn.draw(row, `${name}, ${row.length} values`);
      list.textContent = `${name}: ${row.map(shown).join("  ") || "nothing yet"}`;
      list.setAttribute("data-values", row.join());
    }
    algorithm.forEach((line, n) => line.classList.toggle("lit", frame.algorithm.includes(n)));
    const { pre, lines: code } = sources[frame.launch];
    code.forEach((line, n) => line.classList.toggle("lit", frame.lines.includes(kernel.first + n)));
    const lit = code.filter((line) => line.classList.contains("lit"));
    if (lit.length) pre.scrollTop = Math.max(0, lit[0].offsetTop - 30);
    return `${play.stage}: ${frame.says}`;
  }
  return { node, show };
}

// --- the player ------------------------------------------------------------------------------------------------------

let stages = [];
byId("facts").textContent = data.facts;
byId("followed").textContent = `query ${data.plays[0].row}, the row that is followed`;
const count = Math.max(...data.plays.map((play) => play.frames.length));
const scrubber = byId("step"), speed = byId("speed");
let step = 0, timer = null;

function build() {
  stages = data.plays.map(stage);
  byId("plays").replaceChildren(...stages.map((one) => one.node));
  show(step, false);
}

function show(to, said = true) {
  step = Math.min(Math.max(to, 0), count - 1);
  const sentences = stages.map((one) => one.show(step));
  scrubber.value = step + 1;
  byId("at").textContent = `step ${step + 1} of ${count}`;
  scrubber.setAttribute("aria-valuetext", byId("at").textContent);
  if (said) byId("status").textContent = `Step ${step + 1}. ${sentences.join(". ")}`;
}

function stop() {
  clearInterval(timer);
  timer = null;
  byId("play").textContent = "Play";
}

function start() {
  clearInterval(timer);
  if (step === count - 1) show(0, false);
  byId("play").textContent = "Stop";
  byId("status").textContent = "";
  timer = setInterval(() => {
    show(step + 1, false);
    if (step === count - 1) stop();
  }, 1000 / Number(speed.value));
}

function go(to) {
  stop();
  show(to);
}

function faster(by) {
  const at = Math.min(Math.max(speed.selectedIndex + by, 0), speed.options.length - 1);
  speed.selectedIndex = at;
  if (timer) start();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light colours" : "Dark colours";
  if (stages.length) show(step, false); // the words follow the colours
}

const toggle = () => (timer ? stop() : start());
const other = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const actions = {
  " ": toggle, ArrowLeft: () => go(step - 1), ArrowRight: () => go(step + 1), Home: () => go(0), End: () => go(count - 1),
  "+": () => faster(1), "=": () => faster(1), "-": () => faster(-1), "−": () => faster(-1), t: other, T: other,
};
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in actions)) return;
  const own = event.target.closest("select, pre") || (event.key === " " && event.target.closest("button, summary, a"));
  if (own && event.key.length + (event.key === " ") !== 1) return; // what the control itself does with the key
  event.preventDefault();
  actions[event.key]();
});
byId("first").addEventListener("click", () => go(0));
byId("back").addEventListener("click", () => go(step - 1));
byId("play").addEventListener("click", toggle);
byId("next").addEventListener("click", () => go(step + 1));
byId("last").addEventListener("click", () => go(count - 1));
byId("theme").addEventListener("click", other);
scrubber.max = count;
scrubber.addEventListener("input", () => go(Number(scrubber.value) - 1));
for (const value of [...new Set([...SPEEDS, data.speed])].sort((a, b) => a - b))
  speed.append(make("option", { value, ...(value === data.speed ? { selected: "" } : {}) }, `${value}`));
speed.addEventListener("change", () => timer && start());
const dark = matchMedia("(prefers-color-scheme: dark)");
dark.addEventListener("change", () => theme(dark.matches ? "dark" : "light"));
theme(dark.matches ? "dark" : "light");
narrow.addEventListener("change", build);
build();
