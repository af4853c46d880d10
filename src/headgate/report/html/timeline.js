// The phase timeline: drawn again for any stretch of the run, from every step the report carries.

const PHASES = ["prefill", "decode", "mixed"];
const STRIP = { height: 20, step: 40 }, PANEL = { height: 76, step: 100 }, SIDE = { left: 52, right: 10, top: 16 };
const LEAST = 2e-3; // seconds: nothing shorter is worth zooming into

// Columns of 32-bit integers, the first three of them as differences, bytes of equal weight together, deflated.
async function unpack(packed, rows, columns) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const plain = new Uint8Array(await new Response(stream).arrayBuffer());
  const found = [];
  for (let column = 0; column < columns; column++) {
    const values = new Float64Array(rows), base = column * rows * 4;
    for (let row = 0; row < rows; row++) {
      values[row] = plain[base + row] | plain[base + rows + row] << 8 | plain[base + 2 * rows + row] << 16 | plain[base + 3 * rows + row] << 24;
      if (row && column < 3) values[row] += values[row - 1];
    }
    found.push(values);
  }
  return found;
}

async function readRun(run, line) {
  const [slots, queue, kv, start, seconds, phase] = await unpack(run.data, run.rows, 6);
  let ended = line.low;
  for (let row = 0; row < run.rows; row++) {
    seconds[row] *= line.tick;
    start[row] = ended + start[row] * line.tick; // it was the idle time before
    ended = start[row] + seconds[row];
    kv[row] *= line.kv_tick;
  }
  return { name: run.name, style: run.style, start, seconds, phase, values: [queue, slots, kv] };
}

function firstAfter(start, time) {
  let low = 0, high = start.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (start[middle] < time) low = middle + 1; else high = middle;
  }
  return low;
}

// Time-weighted shares of the phases and means of the panels, with their extremes, in each pixel column.
function columnsOf(run, low, high, count) {
  const width = (high - low) / count, phases = PHASES.map(() => new Float64Array(count));
  const panels = run.values.map(() => ({ mean: new Float64Array(count), low: new Float64Array(count).fill(Infinity), high: new Float64Array(count).fill(-Infinity) }));
  for (let row = Math.max(0, firstAfter(run.start, low) - 1); row < run.start.length && run.start[row] < high; row++) {
    const begin = Math.max(low, run.start[row]), end = Math.min(high, run.start[row] + run.seconds[row]);
    if (end <= begin) continue;
    const last = Math.min(count - 1, Math.floor((end - low) / width));
    for (let column = Math.floor((begin - low) / width); column <= last; column++) {
      const inside = Math.min(end, low + (column + 1) * width) - Math.max(begin, low + column * width);
      if (inside <= 0) continue;
      phases[run.phase[row]][column] += inside / width;
      run.values.forEach((values, place) => {
        const panel = panels[place], value = values[row];
        panel.mean[column] += value * inside / width;
        if (value < panel.low[column]) panel.low[column] = value;
        if (value > panel.high[column]) panel.high[column] = value;
      });
    }
  }
  return { phases, panels };
}

function roundTicks(low, high, most) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough * (1 - 1e-9));
  const found = [];
  for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high * (1 + 1e-12); tick++) found.push(tick * step);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map((value) => [value, Math.abs(value) >= 1e4 && step >= 100 ? `${Number((value / 1e3).toFixed(3))}k` : value.toFixed(decimals)]);
}

function strips(svg, runs, found, x, figure, place) {
  const size = (x.end - x.start) / found[0].phases[0].length;
  runs.forEach((run, number) => {
    const top = SIDE.top + number * STRIP.step;
    svg.append(element("text", { class: "name", x: x.start, y: top - 4 }, run.name));
    svg.append(element("rect", { class: "idle", x: x.start, y: top, width: x.end - x.start, height: STRIP.height }));
    const base = new Float64Array(found[number].phases[0].length);
    PHASES.forEach((phase, which) => {
      let outline = "";
      found[number].phases[which].forEach((share, column) => {
        if (share <= 0) return;
        const tall = Math.min(1, share) * STRIP.height;
        outline += `M${(x.start + column * size).toFixed(1)} ${(top + STRIP.height - base[column] - tall).toFixed(1)}h${size.toFixed(2)}v${tall.toFixed(1)}h-${size.toFixed(2)}z`;
        base[column] += tall;
      });
      svg.append(element("path", { class: `bar ${phase}`, d: outline }));
    });
  });
  return SIDE.top + runs.length * STRIP.step + place;
}

function panel(svg, about, lines, x, top) {
  const most = Math.max(0, ...lines.map((line) => line.high.reduce((a, b) => Math.max(a, b), 0))) || 1;
  const limit = about.limit && about.limit < 1.6 * most ? about.limit : null;
  const y = { low: 0, high: 1.08 * Math.max(most, limit || 0), start: top + PANEL.height, end: top, kind: "linear" };
  svg.append(element("text", { class: "name", x: x.start, y: top - 5 }, `${about.name} (${about.unit})`));
  for (const [value, label] of roundTicks(0, y.high, 3)) {
    const at = pixelAt(y, value);
    svg.append(element("line", { class: "grid", x1: x.start, x2: x.end, y1: at, y2: at }));
    svg.append(element("text", { class: "tick", x: x.start - 6, y: at + 4, "text-anchor": "end" }, label));
  }
  const size = (x.end - x.start) / lines[0].mean.length, at = (column) => (x.start + (column + .5) * size).toFixed(1);
  for (const line of lines) {
    const height = (value) => pixelAt(y, value).toFixed(1), all = [...line.mean.keys()];
    const upper = all.map((column) => `${at(column)} ${height(line.high[column])}`);
    const lower = all.map((column) => `${at(column)} ${height(line.low[column])}`).reverse();
    if (lines.length < 3) svg.append(element("path", { class: `band ${line.style}`, "data-series": line.name, d: `M${upper.concat(lower).join("L")}Z` }));
    svg.append(element("path", { class: `line thin ${line.style}`, "data-series": line.name, d: `M${all.map((column) => `${at(column)} ${height(line.mean[column])}`).join("L")}` }));
  }
  if (limit) {
    const line = pixelAt(y, limit);
    svg.append(element("line", { class: "mark", x1: x.start, x2: x.end, y1: line, y2: line }));
    svg.append(element("text", { class: "marked", x: x.end - 3, y: line + 12, "text-anchor": "end" }, `${about.bound}: ${shown(limit)}`));
  }
}

function drawTimeline(figure, line, runs, view) {
  const plot = figure.querySelector(".plot"), width = Math.max(280, Math.round(plot.clientWidth));
  const visible = runs.filter((run) => !hidden(figure, run.name));
  const height = SIDE.top + visible.length * STRIP.step + line.panels.length * PANEL.step + 36;
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": figure.querySelector("h4").textContent });
  const x = { kind: "linear", low: view.low, high: view.high, start: SIDE.left, end: width - SIDE.right };
  const count = Math.max(40, Math.floor((x.end - x.start) / (visible.length > 3 ? 1.5 : 1)));
  const found = visible.map((run) => columnsOf(run, view.low, view.high, count));
  const bottom = height - 36;
  for (const [value, label] of roundTicks(view.low, view.high, width / 95)) {
    const at = pixelAt(x, value);
    svg.append(element("line", { class: "grid", x1: at, x2: at, y1: SIDE.top, y2: bottom }));
    svg.append(element("text", { class: "tick", x: at, y: bottom + 15, "text-anchor": "middle" }, label));
  }
  svg.append(element("text", { class: "axis", x: (x.start + x.end) / 2, y: height - 4, "text-anchor": "middle" }, "time since the start (s)"));
  if (visible.length) {
    const top = strips(svg, visible, found, x, figure, 8);
    line.panels.forEach((about, place) => {
      const lines = visible.map((run, number) => ({ name: run.name, style: run.style, ...known(found[number].panels[place]) }));
      panel(svg, about, lines, x, top + place * PANEL.step);
    });
  }
  plot.replaceChildren(svg);
  return { svg, x, visible };
}

function known(found) { // a column in which nothing ran
  return { mean: found.mean, low: found.low.map((value) => value === Infinity ? 0 : value), high: found.high.map((value) => value === -Infinity ? 0 : value) };
}

function rowAt(run, time) {
  const row = firstAfter(run.start, time + 1e-12) - 1;
  return row >= 0 && time < run.start[row] + run.seconds[row] ? row : -1;
}

function described(run, time, line) {
  const row = rowAt(run, time);
  if (row < 0) return `${run.name}: idle`;
  const [queue, slots, kv] = run.values.map((values) => shown(values[row]));
  const percent = line.panels[2].limit ? ` (${shown(100 * run.values[2][row] / line.panels[2].limit)} %)` : "";
  return `${run.name}: ${PHASES[run.phase[row]]}, ${queue} waiting, ${slots} in slots, KV ${kv}${percent}`;
}

function startTimeline(figure, line) {
  const view = { low: line.low, high: line.high };
  let runs = [], drawn = null, from = null;
  const draw = () => { if (runs.length) drawn = drawTimeline(figure, line, runs, view); };
  const go = (low, high) => {
    const width = Math.min(line.high - line.low, Math.max(LEAST, high - low));
    view.low = Math.min(Math.max(line.low, low), line.high - width);
    view.high = view.low + width;
    draw();
  };
  const timeAt = (event) => {
    const box = drawn.svg.getBoundingClientRect();
    return Math.min(view.high, Math.max(view.low, valueAt(drawn.x, event.clientX - box.left)));
  };
  const moves = { in: [.25, -.25], out: [-.5, .5], earlier: [-.5, -.5], later: [.5, .5], all: [-1e9, 1e9] };
  const move = (name) => { const size = view.high - view.low; go(view.low + moves[name][0] * size, view.high + moves[name][1] * size); };
  figure.querySelectorAll("[data-zoom]").forEach((button) => button.addEventListener("click", () => move(button.dataset.zoom)));
  const plot = figure.querySelector(".plot");
  plot.addEventListener("keydown", (event) => {
    const name = { "+": "in", "-": "out", ArrowLeft: "earlier", ArrowRight: "later", 0: "all" }[event.key];
    if (name) { event.preventDefault(); move(name); }
  });
  plot.addEventListener("wheel", (event) => {
    if (!drawn || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    const at = timeAt(event), scale = event.deltaY > 0 ? 1.25 : .8;
    go(at - (at - view.low) * scale, at + (view.high - at) * scale);
  }, { passive: false });
  plot.addEventListener("pointerdown", (event) => { if (drawn && event.button === 0) from = timeAt(event); });
  plot.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    const at = timeAt(event);
    showTip([`at ${shown(at)} s`, ...drawn.visible.map((run) => described(run, at, line))].join("\n"), event);
    drawn.svg.querySelectorAll(".cross, .chosen").forEach((part) => part.remove());
    const place = pixelAt(drawn.x, at), bottom = drawn.svg.viewBox.baseVal.height - 36;
    drawn.svg.append(element("line", { class: "cross", x1: place, x2: place, y1: SIDE.top, y2: bottom }));
    if (from !== null) {
      const start = pixelAt(drawn.x, from);
      drawn.svg.append(element("rect", { class: "chosen", x: Math.min(start, place), width: Math.abs(place - start), y: SIDE.top, height: bottom - SIDE.top }));
    }
  });
  const release = (event) => {
    if (!drawn || from === null) return;
    const ends = [from, timeAt(event)].sort((a, b) => a - b), seen = (ends[1] - ends[0]) / (view.high - view.low);
    from = null;
    if (seen > .01) go(ends[0], ends[1]); else drawn.svg.querySelectorAll(".chosen").forEach((part) => part.remove());
  };
  plot.addEventListener("pointerup", release);
  plot.addEventListener("pointercancel", () => { from = null; hideTip(); });
  plot.addEventListener("pointerleave", () => { hideTip(); });
  plot.addEventListener("dblclick", () => move("all"));
  startLegend(figure, draw);
  startSaving(figure, () => stepsAsText(runs, view, line));
  Promise.all(line.runs.map((run) => readRun(run, line))).then((read) => {
    runs = read;
    figure.dataset.zooms = "yes";
    draw();
    new ResizeObserver(() => { if (drawn && Math.abs(drawn.svg.viewBox.baseVal.width - plot.clientWidth) > 1) draw(); }).observe(plot);
  }).catch(() => { figure.querySelector(".zoom").hidden = true; }); // the picture of the whole run stays
}

function stepsAsText(runs, view, line) {
  const rows = [["run", "start (s)", "seconds", "phase", ...line.panels.map((each) => `${each.name} (${each.unit})`)]];
  for (const run of runs) {
    for (let row = 0; row < run.start.length; row++) {
      if (run.start[row] + run.seconds[row] < view.low || run.start[row] > view.high) continue;
      rows.push([run.name, run.start[row].toFixed(6), run.seconds[row].toFixed(6), PHASES[run.phase[row]], ...run.values.map((values) => shown(values[row]).replaceAll(",", ""))]);
    }
  }
  return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

start();
