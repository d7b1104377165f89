"use strict";
// Texts of models and documents enter the page by textContent only.

const WINDOW = 4000; // tokens shown at a time
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const byId = (id) => document.getElementById(id);
const INDEX = JSON.parse(byId("index").textContent);
const at = { run: 0, context: 0, question: 0, arm: 0, start: 0, token: -1 };
let item = null; // the context that is shown, inflated

function make(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

const breakable = (name) => name.split(/(?<=[/_:,])/).flatMap((part) => [part, make("wbr")]);
const count = (number) => number.toLocaleString("en");
const share = (number) => `${(100 * number).toFixed(number < 0.1 ? 1 : 0)}%`;

// Tables -----------------------------------------------------------------------------------------------------

function sortKey(row, column) {
  const cell = row.cells[column];
  return cell.dataset.value !== undefined ? Number(cell.dataset.value) : cell.textContent.trim();
}

function compare(a, b) {
  if (a === "-" || b === "-") return (a === "-") - (b === "-");
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}

function sortTable(head) {
  const column = head.cellIndex;
  const table = head.closest("table");
  const first = head.classList.contains("number") ? "descending" : "ascending";
  const other = first === "ascending" ? "descending" : "ascending";
  const order = head.getAttribute("aria-sort") === first ? other : first;
  $$("thead th", table).forEach((each) => each.setAttribute("aria-sort", "none"));
  head.setAttribute("aria-sort", order);
  const sign = order === "ascending" ? 1 : -1;
  const rows = [...table.tBodies[0].rows].map((row) => [sortKey(row, column), row]);
  const missing = (key) => key === "-";
  rows.sort(([a], [b]) => (missing(a) || missing(b) ? compare(a, b) : sign * compare(a, b)));
  table.tBodies[0].append(...rows.map(([, row]) => row));
}

document.addEventListener("click", (event) => {
  const button = event.target.closest("table.sortable thead button");
  if (button) sortTable(button.closest("th"));
});

// Runs, rules, sections --------------------------------------------------------------------------------------

function listSections() {
  const shown = $$("main section").filter((section) => section.id && !section.closest("[hidden]"));
  byId("sections").replaceChildren(
    ...shown.map((section) => make("a", { href: `#${section.id}` }, section.querySelector("h2").textContent.split(" to the ")[0])),
  );
}

function chooseRule(run, place) {
  $$(".rule", run).forEach((block) => (block.hidden = block.dataset.rule !== String(place)));
  listSections();
}

function chooseRun(place) {
  $$("article.run").forEach((article) => (article.hidden = article.dataset.run !== String(place)));
  if (byId("pick-run")) byId("pick-run").value = String(place);
  listSections();
}

function bringForward(button) {
  const pressed = button.getAttribute("aria-pressed") === "true";
  const run = button.closest("article");
  $$(".legend button", run).forEach((each) => each.setAttribute("aria-pressed", "false"));
  button.setAttribute("aria-pressed", String(!pressed));
  $$(".panels", run).forEach((panels) => {
    panels.classList.toggle("chosen", !pressed);
    $$(".curve", panels).forEach((curve) => curve.classList.toggle("front", curve.classList.contains(`curve${button.dataset.curve}`)));
  });
}

// Compressed blocks ------------------------------------------------------------------------------------------

async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

async function readItem(name) {
  const block = JSON.parse(byId(name).textContent);
  const text = JSON.parse(new TextDecoder().decode(await inflate(block.text)));
  const kept = await Promise.all(block.kept.map(async (counts) => (counts ? new Uint16Array(await inflate(counts)) : null)));
  return { ...text, kept };
}

// The item: choosing it --------------------------------------------------------------------------------------

const run = () => INDEX[at.run];
const entry = () => run().contexts[at.context];

function fill(select, options, chosen) {
  select.replaceChildren(...options.map(([value, label]) => make("option", { value }, label)));
  select.value = String(chosen);
}

function fillPickers() {
  const tasks = [...new Set(run().contexts.map((context) => context.task))];
  const here = run().contexts.map((context, place) => [place, context]).filter(([, context]) => context.task === entry().task);
  fill(byId("pick-task"), tasks.map((task) => [task, task]), entry().task);
  fill(byId("pick-context"), here.map(([place, context]) => [place, context.id]), at.context);
  fill(byId("pick-question"), entry().questions.map((question, place) => [place, question]), at.question);
  byId("previous").disabled = at.context === 0 && at.question === 0;
  byId("next").disabled = at.context === run().contexts.length - 1 && at.question === entry().questions.length - 1;
}

function step(by) {
  at.question += by;
  if (at.question < 0) {
    at.context -= 1;
    at.question = entry().questions.length - 1;
  } else if (at.question >= entry().questions.length) {
    at.context += 1;
    at.question = 0;
  }
  return show();
}

// Which request is the newest: a slow block must not overwrite a later choice.
let asked = 0;

async function show() {
  if (!run().contexts.length) {
    byId("item").replaceChildren(make("p", { class: "quiet" }, "No context of this run is in this page."));
    document.querySelector(".picks").hidden = true;
    return;
  }
  const ticket = ++asked;
  document.querySelector(".picks").hidden = false;
  fillPickers();
  const read = await readItem(entry().block).catch(() => null);
  if (ticket !== asked) return;
  if (read === null) {
    byId("item").replaceChildren(make("p", {}, "This item is damaged in the run folder and cannot be shown."));
    return;
  }
  item = read;
  at.start = 0;
  at.token = -1;
  if (!armRow(at.arm)) at.arm = run().arms.findIndex((_, place) => armRow(place));
  byId("item").replaceChildren(questionPart(), answersPart(), make("div", { id: "map" }));
  drawStrips();
  showMap();
  history.replaceState(null, "", `#item=${at.run}.${at.context}.${at.question}.${at.arm}`);
}

const question = () => item.questions[entry().questions[at.question]];
const armRow = (place) => question().rows[place];

// The item: question and answers -----------------------------------------------------------------------------

function questionPart() {
  const asked = question();
  const facts = [`source: ${item.source}`, ...Object.entries(item.meta).filter(([, value]) => typeof value !== "object").map(([name, value]) => `${name}: ${value}`)];
  const tail = item.pieces.slice(-40).join("");
  const prompt = make("div", { class: "prompt" },
    make("span", { class: "context", title: "the end of the context" }, `… ${tail}`),
    make("b", { title: "the question" }, asked.text ? `\n${asked.text}\n` : "\n(the question was not recorded)\n"),
    asked.answer_prefix ? make("span", { class: "prefix", title: "fed as the start of the reply" }, asked.answer_prefix) : null);
  const accepted = (asked.references || []).map((text) => `“${text}”`).join(" or ");
  return make("div", {},
    make("ul", { class: "chips" }, ...facts.map((fact) => make("li", {}, fact))),
    make("h3", {}, "Prompt, its end"), prompt,
    make("h3", {}, "Accepted answers"), make("div", { class: "prompt" }, accepted || "none recorded"));
}

function gradeNames() {
  const names = new Set(question().rows.flatMap((row) => (row ? Object.keys(row.grades) : [])));
  return [...names].sort();
}

function answersPart() {
  const grades = gradeNames();
  const heads = ["arm", ...grades, "kept entries", "answer", ...(item.pieces.length ? ["what it kept"] : [])];
  const number = (name) => grades.includes(name) || name === "kept entries";
  const body = run().arms.map((arm, place) => (armRow(place) ? answerRow(arm, place, grades) : null));
  return make("div", {},
    make("h3", {}, "Answers of all arms"),
    make("div", { class: "scroll answers", tabindex: 0, role: "region", "aria-label": "Answers of all arms" },
      make("table", { class: "sortable" },
        make("thead", {}, make("tr", {}, ...heads.map((name) =>
          make("th", { scope: "col", "aria-sort": "none", class: number(name) ? "number" : null }, make("button", { type: "button" }, name))))),
        make("tbody", {}, ...body.filter((row) => row !== null)))));
}

function answerRow(arm, place, grades) {
  const row = armRow(place);
  const radio = make("input", { type: "radio", name: "arm", value: place, checked: place === at.arm, onchange: () => chooseArm(place) });
  const swatch = arm.place === null ? null : make("i", { class: "swatch" });
  if (swatch) swatch.style.background = `var(--m${arm.place})`;
  const line = make("tr", { class: place === at.arm ? "chosen" : null, "data-arm": place, onclick: () => chooseArm(place) },
    make("th", { scope: "row" }, make("label", {}, radio, swatch, make("span", {}, ...breakable(arm.label)))));
  for (const name of grades) line.append(gradeCell(row.grades[name], name));
  const all = item.heads * item.pieces.length;
  const kept = row.kept === null ? make("td", { class: "number" }, "-") : make("td", { class: "number", "data-value": row.kept }, count(row.kept));
  if (row.kept !== null && all) kept.append(make("small", {}, share(row.kept / all)));
  const text = row.skipped ? `not run: ${row.skipped}` : row.output === null ? "(no answer is written for this task)" : row.output.trim() || "(empty)";
  line.append(kept, make("td", { class: "answer" }, make("div", { title: text }, text)));
  if (item.pieces.length) line.append(make("td", {}, make("canvas", { class: "strip", width: 240, height: 1, "data-arm": place, "aria-hidden": "true" })));
  return line;
}

function gradeCell(value, name) {
  if (value === undefined) return make("td", { class: "number" }, "-");
  const isShare = ["official", "strict", "top1"].includes(name) && value >= 0 && value <= 1;
  const cell = make("td", { class: isShare ? "number shade good" : "number", "data-value": value }, String(Math.round(value * 1000) / 1000));
  if (isShare) cell.style.setProperty("--s", value);
  return cell;
}

function chooseArm(place) {
  if (place === at.arm) return;
  at.arm = place;
  $$(".answers tbody tr").forEach((line) => {
    const chosen = line.dataset.arm === String(place);
    line.classList.toggle("chosen", chosen);
    line.querySelector("input").checked = chosen;
  });
  showMap();
  history.replaceState(null, "", `#item=${at.run}.${at.context}.${at.question}.${at.arm}`);
}

// The item: the map ------------------------------------------------------------------------------------------

// The whole cache has no counts of its own: every head kept every token.
function keptAt(place, token) {
  const counts = item.kept[place];
  return counts ? counts[token] : run().arms[place].id === "whole" ? item.heads : null;
}

function drawStrip(canvas, place) {
  const pen = canvas.getContext("2d");
  const width = canvas.width;
  const colour = getComputedStyle(document.documentElement).getPropertyValue("--mark").trim();
  pen.clearRect(0, 0, width, canvas.height);
  pen.fillStyle = colour;
  const tokens = item.pieces.length;
  for (let x = 0; x < width; x += 1) {
    const from = Math.floor((x * tokens) / width);
    const to = Math.max(from + 1, Math.floor(((x + 1) * tokens) / width));
    let sum = 0;
    for (let token = from; token < to; token += 1) sum += keptAt(place, token) || 0;
    pen.globalAlpha = item.heads ? Math.min(1, sum / ((to - from) * item.heads)) : 0;
    pen.fillRect(x, 0, 1, canvas.height);
  }
}

const drawStrips = () => $$(".strip").forEach((canvas) => drawStrip(canvas, Number(canvas.dataset.arm ?? at.arm)));

// Tokens in which an accepted answer stands, by their share of the text.
function hits() {
  const starts = [];
  let length = 0;
  for (const piece of item.pieces) {
    starts.push(length);
    length += piece.length;
  }
  const text = item.pieces.join("");
  const found = new Set();
  for (const answer of question().references || []) {
    if (answer.trim().length < 2) continue;
    for (let from = text.indexOf(answer); from >= 0; from = text.indexOf(answer, from + answer.length)) {
      starts.forEach((start, token) => {
        if (start < from + answer.length && start + item.pieces[token].length > from) found.add(token);
      });
      if (found.size > 5000) return found; // an answer that stands everywhere marks nothing
    }
  }
  return found;
}

function showMap() {
  const map = byId("map");
  const row = armRow(at.arm);
  const title = make("h3", {}, `What ${run().arms[at.arm].label} kept of the context`);
  if (!item.pieces.length || keptAt(at.arm, 0) === null) {
    map.replaceChildren(title, make("p", { class: "quiet" }, row && row.skipped ? `Nothing: ${row.skipped}` : "No counts were recorded."));
    return;
  }
  const found = hits();
  const strip = make("canvas", { class: "strip wide", width: 1200, height: 1, "aria-hidden": "true", onclick: (event) => goTo(Math.floor((event.offsetX / strip.clientWidth) * item.pieces.length)) });
  const next = make("button", { type: "button", onclick: () => goToNext(found) }, "Next accepted answer in the context");
  const bar = make("div", { class: "bar" },
    make("span", {}, "0 ", make("i", { class: "ramp" }), ` ${item.heads} (layer, head) entries`),
    found.size ? next : null,
    make("span", { class: "readout", id: "readout", "aria-live": "polite" }, "Point at a token, or move with the arrow keys."));
  const box = make("div", { class: "tokens", tabindex: 0, role: "group", "aria-label": "Context, coloured by kept entries; arrow keys move from token to token", "aria-describedby": "readout",
    onpointerover: pointAt, onclick: pointAt, onkeydown: moveBy });
  map.replaceChildren(...[title, strip, bar, pager(), box, answerInFull(row)].filter((part) => part !== null));
  drawStrip(strip, at.arm);
  showTokens(box, found);
}

function answerInFull(row) {
  const text = row.skipped ? `not run: ${row.skipped}` : row.output;
  if (text === null) return null;
  const note = row.finish === "limit" || row.finish === "length" ? " (cut off at its token limit)" : "";
  return make("div", {}, make("h3", {}, `Its answer in full${note}`), make("div", { class: "prompt" }, text || "(empty)"));
}

function pager() {
  const total = item.pieces.length;
  if (total <= WINDOW) return null;
  const end = Math.min(total, at.start + WINDOW);
  const turn = (by) => () => { at.start += by; showMap(); };
  return make("div", { class: "bar" },
    make("button", { type: "button", disabled: at.start === 0, onclick: turn(-WINDOW) }, "← Earlier"),
    make("span", {}, `tokens ${count(at.start + 1)} to ${count(end)} of ${count(total)}`),
    make("button", { type: "button", disabled: end === total, onclick: turn(WINDOW) }, "Later →"));
}

function showTokens(box, found) {
  const end = Math.min(item.pieces.length, at.start + WINDOW);
  const spans = [];
  for (let token = at.start; token < end; token += 1) {
    const kept = keptAt(at.arm, token);
    const span = document.createElement("span");
    span.textContent = item.pieces[token];
    span.style.setProperty("--s", (kept / item.heads).toFixed(3));
    if (kept === 0) span.className = "none";
    if (found.has(token)) span.classList.add("hit");
    spans.push(span);
  }
  box.replaceChildren(...spans);
  if (at.token >= at.start && at.token < end) mark(at.token, true);
}

function mark(token, scroll) {
  const box = document.querySelector(".tokens");
  at.token = token;
  $$(".here", box).forEach((span) => span.classList.remove("here"));
  const span = box.children[token - at.start];
  span.classList.add("here");
  const kept = keptAt(at.arm, token);
  byId("readout").textContent = `Token ${count(token)} ${JSON.stringify(item.pieces[token])}: kept by ${kept} of ${item.heads} (${share(kept / item.heads)})`;
  if (scroll) box.scrollTop = span.offsetTop - box.clientHeight / 2;
}

function pointAt(event) {
  const box = event.currentTarget;
  if (event.target !== box) mark(at.start + [...box.children].indexOf(event.target), false);
}

function moveBy(event) {
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10, PageDown: 100, PageUp: -100, Home: -Infinity, End: Infinity }[event.key];
  if (by === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  const last = Math.min(item.pieces.length, at.start + WINDOW) - 1;
  mark(Math.min(last, Math.max(at.start, (at.token < 0 ? at.start - 1 : at.token) + by)), true);
}

function goTo(token) {
  at.token = Math.min(item.pieces.length - 1, Math.max(0, token));
  const start = Math.floor(at.token / WINDOW) * WINDOW;
  if (start === at.start) return mark(at.token, true);
  at.start = start;
  return showMap();
}

function goToNext(found) {
  const ordered = [...found].sort((a, b) => a - b).filter((token) => !found.has(token - 1));
  const next = ordered.find((token) => token > at.token);
  goTo(next === undefined ? ordered[0] : next);
}

// Start ------------------------------------------------------------------------------------------------------

function fromAddress() {
  const match = location.hash.match(/^#item=(\d+)\.(\d+)\.(\d+)\.(\d+)$/);
  if (!match) return false;
  const [place, context, asked, arm] = match.slice(1).map(Number);
  if (!INDEX[place]?.contexts[context]?.questions[asked] || !INDEX[place].arms[arm]) return false;
  Object.assign(at, { run: place, context, question: asked, arm });
  return true;
}

function choose(changes) {
  Object.assign(at, changes);
  return show();
}

function listen() {
  byId("pick-task").addEventListener("change", (event) =>
    choose({ context: run().contexts.findIndex((context) => context.task === event.target.value), question: 0 }));
  byId("pick-context").addEventListener("change", (event) => choose({ context: Number(event.target.value), question: 0 }));
  byId("pick-question").addEventListener("change", (event) => choose({ question: Number(event.target.value) }));
  byId("previous").addEventListener("click", () => step(-1));
  byId("next").addEventListener("click", () => step(1));
  byId("pick-run")?.addEventListener("change", (event) => {
    chooseRun(Number(event.target.value));
    choose({ run: Number(event.target.value), context: 0, question: 0, arm: 0 });
  });
  $$(".rules input").forEach((radio) => radio.addEventListener("change", () => chooseRule(radio.closest("article"), radio.value)));
  $$(".legend button").forEach((button) => button.addEventListener("click", () => bringForward(button)));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => item && drawStrips());
}

const linked = fromAddress();
if (!linked && INDEX[0].arms.length > 1) at.arm = 1; // an arm that evicted something shows more than the whole cache
listen();
$$("article.run").forEach((article) => chooseRule(article, 0));
chooseRun(at.run);
show().then(() => linked && byId("items").scrollIntoView());
