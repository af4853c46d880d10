"use strict";
// What a reader can do with a report: switch the theme, read values, sort and copy tables, save figures.

const tip = document.getElementById("tip");
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

// -- theme --------------------------------------------------------------------------------------------

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  document.getElementById("theme").textContent = `Theme: ${theme}`;
}

function startTheme() {
  const order = ["auto", "light", "dark"];
  let theme = "auto";
  try { theme = localStorage.getItem("headgate-theme") || "auto"; } catch { /* nothing is remembered then */ }
  setTheme(order.includes(theme) ? theme : "auto");
  document.getElementById("theme").addEventListener("click", () => {
    theme = order[(order.indexOf(theme) + 1) % order.length];
    setTheme(theme);
    try { localStorage.setItem("headgate-theme", theme); } catch { /* as above */ }
  });
}

// -- numbers ------------------------------------------------------------------------------------------

function shown(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "-";
  if (value === 0) return "0";
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return Number(value.toPrecision(4)).toString();
}

function straight(kind, value) {
  if (kind === "log") return Math.log10(value);
  return kind === "tail" ? Math.log10(value / (1 - value)) : value;
}

function bent(kind, value) {
  if (kind === "log") return 10 ** value;
  return kind === "tail" ? 1 / (1 + 10 ** -value) : value;
}

function valueAt(axis, pixel) {
  const low = straight(axis.kind, axis.low), high = straight(axis.kind, axis.high);
  return bent(axis.kind, low + (high - low) * (pixel - axis.start) / (axis.end - axis.start));
}

function pixelAt(axis, value) {
  const low = straight(axis.kind, axis.low), high = straight(axis.kind, axis.high);
  return axis.start + (axis.end - axis.start) * (straight(axis.kind, value) - low) / (high - low);
}

// -- tooltips -----------------------------------------------------------------------------------------

function showTip(text, event) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  const top = event.clientY + 14 + box.height > innerHeight ? event.clientY - box.height - 14 : event.clientY + 14;
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

function hideTip() { tip.hidden = true; }

function nearest(values, wanted, axis) {
  let best = -1, distance = Infinity;
  for (let row = 0; row < values.length; row++) {
    if (values[row] === null) continue;
    const away = Math.abs(pixelAt(axis, values[row]) - wanted);
    if (away < distance) { distance = away; best = row; }
  }
  return best;
}

function hidden(figure, name) {
  return [...figure.querySelectorAll(".entry[aria-pressed=false]")].some((entry) => entry.dataset.for === name);
}

// A distribution is read across (which share of the requests), everything else upward (which value here).
function startTooltip(figure, data) {
  const plot = figure.querySelector(".plot"), svg = plot.querySelector("svg");
  const cross = element("line", { class: "cross", visibility: "hidden" });
  svg.append(cross);
  const read = data.y.kind === "tail" ? ["y", "x"] : ["x", "y"];
  plot.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), view = svg.viewBox.baseVal;
    const at = read[0] === "x" ? (event.clientX - box.left) / box.width * view.width
      : (event.clientY - box.top) / box.height * view.height;
    const axis = data[read[0]];
    if (at < Math.min(axis.start, axis.end) || at > Math.max(axis.start, axis.end)) { leave(); return; }
    const here = valueAt(axis, at);
    const title = read[0] === "y" ? `${shown(100 * here)} % are at most, ${data.x.label}` : `${data.x.label}: ${shown(here)}`;
    const lines = data.series.filter((each) => !hidden(figure, each.name)).map((each) => {
      const row = nearest(each[read[0]], at, axis);
      if (row < 0) return `${each.name}: -`;
      const span = each.low && each.low[row] !== null ? ` [${shown(each.low[row])}, ${shown(each.high[row])}]` : "";
      return `${each.name}: ${shown(each[read[1]][row])}${span}`;
    });
    const other = data[read[1]];
    const ends = read[0] === "x" ? { x1: at, x2: at, y1: other.start, y2: other.end } : { y1: at, y2: at, x1: other.start, x2: other.end };
    for (const [key, value] of Object.entries(ends)) cross.setAttribute(key, value);
    cross.setAttribute("visibility", "visible");
    showTip([title, ...lines].join("\n"), event);
  });
  const leave = () => { cross.setAttribute("visibility", "hidden"); hideTip(); };
  plot.addEventListener("pointerleave", leave);
  plot.addEventListener("pointercancel", leave);
}

function startTitles(figure) { // bars say their value themselves
  figure.querySelectorAll("[data-tip]").forEach((part) => {
    part.addEventListener("pointermove", (event) => showTip(part.dataset.tip, event));
    part.addEventListener("pointerleave", hideTip);
  });
}

function startLegend(figure, redraw) {
  figure.querySelectorAll(".entry").forEach((entry) => {
    if (entry.querySelector(".block")) { entry.disabled = true; return; }
    entry.setAttribute("aria-pressed", "true");
    entry.title = "Point: this one alone; click: show or hide";
    entry.addEventListener("click", () => {
      const on = entry.getAttribute("aria-pressed") !== "true";
      entry.setAttribute("aria-pressed", String(on));
      figure.querySelectorAll("[data-series]").forEach((part) => {
        if (part.dataset.series === entry.dataset.for) part.style.display = on ? "" : "none";
      });
      if (redraw) redraw();
    });
    const others = (faded) => figure.querySelectorAll("[data-series]").forEach((part) => {
      if (part.dataset.series !== entry.dataset.for) part.classList.toggle("faded", faded);
    });
    entry.addEventListener("pointerenter", () => others(entry.getAttribute("aria-pressed") === "true"));
    entry.addEventListener("pointerleave", () => others(false));
  });
}

// -- tables -------------------------------------------------------------------------------------------

function sortBy(table, column) {
  const heads = [...table.tHead.rows[0].cells], head = heads[column];
  const down = head.getAttribute("aria-sort") === "ascending";
  heads.forEach((each) => each.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const rows = [...table.tBodies[0].rows].sort((one, other) => {
    const [a, b] = [key(one), key(other)];
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return down ? -order : order;
  });
  table.tBodies[0].append(...rows);
}

function tabSeparated(table) {
  const clean = (text) => text.replace(/\s+/g, " ").trim();
  const heads = [...table.tHead.rows[0].cells].map((head) => clean([...head.firstChild.childNodes].map((part) => part.textContent).join(" ")));
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => clean(cell.dataset.value ?? cell.textContent)));
  return [heads, ...rows].map((row) => row.join("\t")).join("\n") + "\n";
}

async function copyText(text) {
  try { await navigator.clipboard.writeText(text); return true; } catch { /* an older way */ }
  const area = document.createElement("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  return done;
}

function startTables() {
  document.querySelectorAll("table").forEach((table) => {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => sortBy(table, column));
    });
  });
  document.querySelectorAll("[data-copy]").forEach((button) => button.addEventListener("click", async () => {
    const done = await copyText(tabSeparated(button.closest(".grid-box").querySelector("table")));
    button.textContent = done ? "Copied" : "Not allowed here";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  }));
}

// -- saving -------------------------------------------------------------------------------------------

function save(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 5000);
}

function fileName(figure, ending) {
  const title = figure.querySelector("h4").textContent.toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  return `${title || figure.id}.${ending}`;
}

function quoted(value) {
  const text = value === null || value === undefined ? "" : String(value);
  return /[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function commaSeparated(data) {
  const rows = data.rows ? [data.heads, ...data.rows] : [["series", data.x.label, data.y.label, "low", "high"]];
  for (const each of data.rows ? [] : data.series) {
    each.x.forEach((x, row) => rows.push([each.name, x, each.y[row], each.low?.[row], each.high?.[row]]));
  }
  return rows.map((row) => row.map(quoted).join(",")).join("\n") + "\n";
}

// Title and legend as rows above a picture; how tall they are.
function addHeading(figure, picture, width) {
  const inside = element("g", {}), rows = [element("text", { x: 8, y: 20, "font-weight": 600, "font-size": 14 }, figure.querySelector("h4").textContent)];
  let x = 8, y = 40;
  for (const entry of figure.querySelectorAll(".entry:not([aria-pressed=false])")) {
    const long = 30 + 7 * entry.textContent.length, key = entry.querySelector("i").className;
    if (x > 8 && x + long > width) { x = 8; y += 18; }
    rows.push(element("rect", { class: `bar ${key.replace("idle-key", "idle")}`, x, y: y - 8, width: 16, height: 6 }));
    rows.push(element("text", { x: x + 21, y, "font-size": 12 }, entry.textContent));
    x += long;
  }
  inside.append(...picture.childNodes);
  inside.setAttribute("transform", `translate(0 ${y + 8})`);
  picture.append(...rows, inside);
  return y + 8;
}

// A picture knows nothing of this page: its colours and rules travel with it.
function standalone(figure) {
  const svg = figure.querySelector(".plot svg"), view = svg.viewBox.baseVal;
  const copy = svg.cloneNode(true), rules = [], style = getComputedStyle(document.documentElement);
  copy.querySelectorAll(".cross, .chosen").forEach((part) => part.remove());
  const height = view.height + addHeading(figure, copy, view.width);
  for (const rule of document.styleSheets[0].cssRules) {
    if (rule.selectorText && /^(svg|\.c\d|\.prefill|\.decode|\.mixed)/.test(rule.selectorText)) rules.push(rule.cssText);
  }
  const names = new Set(rules.join(" ").match(/--[\w-]+/g));
  for (const name of names) copy.style.setProperty(name, style.getPropertyValue(name));
  copy.setAttribute("xmlns", SVG);
  copy.setAttribute("width", view.width);
  copy.setAttribute("height", height);
  copy.setAttribute("viewBox", `0 0 ${view.width} ${height}`);
  copy.prepend(element("rect", { width: "100%", height: "100%", fill: style.getPropertyValue("--card") }));
  copy.prepend(element("style", {}, rules.join("\n")));
  return copy;
}

function savePicture(figure) {
  const picture = standalone(figure), view = picture.viewBox.baseVal, scale = 2;
  const text = new XMLSerializer().serializeToString(picture);
  const image = new Image();
  image.onload = () => {
    const canvas = document.createElement("canvas");
    canvas.width = view.width * scale;
    canvas.height = view.height * scale;
    canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
    canvas.toBlob((blob) => save(fileName(figure, "png"), blob));
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

function startSaving(figure, csv) {
  figure.querySelector("[data-save=png]").addEventListener("click", () => savePicture(figure));
  figure.querySelector("[data-save=csv]").addEventListener("click", () => save(fileName(figure, "csv"), new Blob([csv()], { type: "text/csv" })));
}

// -- tables wider than the page -------------------------------------------------------------------------

function startCues() {
  const boxes = [...document.querySelectorAll(".scroll")];
  const mark = (box) => box.toggleAttribute("data-more", box.scrollWidth - box.clientWidth - box.scrollLeft > 4);
  boxes.forEach((box) => box.addEventListener("scroll", () => mark(box), { passive: true }));
  document.querySelectorAll("details").forEach((each) => each.addEventListener("toggle", () => boxes.forEach(mark)));
  addEventListener("resize", () => boxes.forEach(mark));
  boxes.forEach(mark);
}

// -- start --------------------------------------------------------------------------------------------

function startFigure(figure) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  if (data.timeline) { startTimeline(figure, data.timeline); return; }
  if (data.x) startTooltip(figure, data);
  startTitles(figure);
  startLegend(figure);
  startSaving(figure, () => commaSeparated(data));
}

function start() {
  startTheme();
  startTables();
  startCues();
  document.querySelectorAll("figure").forEach(startFigure);
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => { each.open = true; }));
  addEventListener("scroll", hideTip, { passive: true });
  document.documentElement.dataset.ready = "yes";
}
