"use strict";
// One run is { title, text, rounds, begun, ended, problem }; rounds are as `return_draft_trees` has them.

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const BOX = { width: 148, height: 42, column: 178, row: 50, margin: 10 };
const RUNS = $("runs");

function make(tag, attributes = {}, text = null, space = null) {
  const element = space ? document.createElementNS(space, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

const visible = (text) => text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");
const short = (text) => (Array.from(text).length > 16 ? Array.from(text).slice(0, 15).join("") + "…" : text);
const share = (value) => (value === null || value === undefined ? "–" : value >= 0.995 ? "1.0" : value.toFixed(2).slice(1));
const ms = (value) => `${value >= 100 ? value.toFixed(0) : value.toFixed(1)} ms`;

// ---- the tree of a round --------------------------------------------------------------------------

function nodesOf(round) {
  const nodes = round.tokens.map((_, i) => ({
    text: round.texts[i], score: round.scores ? round.scores[i] : null, prob: round.probs[i],
    parent: round.parents[i], kind: i === 0 ? "root" : round.accepted.includes(i) ? "taken" : "miss", children: [],
  }));
  if (round.output_ids.length > round.accepted.length) {
    const last = round.output_ids.length - 1;
    const above = round.accepted.length ? round.accepted[round.accepted.length - 1] : 0;
    nodes.push({ text: round.output_texts[last], score: null, prob: round.output_probs[last], parent: above, kind: "own", children: [] });
  }
  nodes.forEach((node) => node.parent >= 0 && nodes[node.parent].children.push(node));
  const rank = (node) => (node.kind === "taken" || node.kind === "own" ? 2 : node.score ?? 0);
  nodes.forEach((node) => node.children.sort((a, b) => rank(b) - rank(a)));
  return nodes;
}

// The first child stands in its parent's row, so that the accepted path is the top line.
function place(node, depth, row) {
  node.x = BOX.margin + depth * BOX.column;
  node.y = BOX.margin + row * BOX.row;
  let next = row;
  node.children.forEach((child, i) => { next = place(child, depth + 1, i ? next + 1 : row); });
  return next;
}

function drawTree(round) {
  const nodes = nodesOf(round);
  const rows = place(nodes[0], 0, 0) + 1;
  const width = Math.max(...nodes.map((node) => node.x)) + BOX.width + BOX.margin;
  const height = rows * BOX.row + 2 * BOX.margin;
  const about = `Tree of ${round.tokens.length} nodes, accepted: ${round.output_texts.join("")}`;
  const svg = make("svg", { width, height, role: "img", "aria-label": about }, null, SVG);
  for (const node of nodes) {
    for (const child of node.children) {
      const [x, y, to, down] = [node.x + BOX.width, node.y + BOX.height / 2, child.x, child.y + BOX.height / 2];
      const curve = `M${x} ${y} C${x + 18} ${y} ${to - 18} ${down} ${to} ${down}`;
      svg.append(make("path", { d: curve, class: `edge ${child.kind}` }, null, SVG));
    }
  }
  for (const node of nodes) svg.append(drawNode(node));
  return svg;
}

function drawNode(node) {
  const group = make("g", { class: node.kind, transform: `translate(${node.x} ${node.y})` }, null, SVG);
  group.append(make("title", {}, `${JSON.stringify(node.text)}`, SVG));
  group.append(make("rect", { width: BOX.width, height: BOX.height, rx: 6 }, null, SVG));
  group.append(make("text", { x: 8, y: 18 }, short(visible(node.text)) || "no text", SVG));
  const numbers = { root: "the last token", own: `target ${share(node.prob)}` };
  const both = `draft ${share(node.score)} target ${share(node.prob)}`;
  group.append(make("text", { x: 8, y: 34, class: "numbers" }, numbers[node.kind] ?? both, SVG));
  return group;
}

function tableOf(round) {
  const table = make("table");
  const head = table.appendChild(make("tr"));
  for (const name of ["node", "parent", "token", "draft", "target", ""]) head.append(make("th", { scope: "col" }, name));
  round.tokens.forEach((_, i) => {
    const taken = round.accepted.includes(i);
    const row = table.appendChild(make("tr", taken ? { class: "taken" } : {}));
    const score = round.scores ? share(round.scores[i]) : "–";
    const cells = [i, i ? round.parents[i] : "–", visible(round.texts[i]), score, i ? share(round.probs[i]) : "–"];
    for (const cell of [...cells, taken ? "accepted" : ""]) row.append(make("td", {}, cell));
  });
  return table;
}

// ---- one run --------------------------------------------------------------------------------------

class View {
  constructor(run) {
    this.run = run;
    this.shown = 0;
    this.chosen = -1;
    this.follows = true;
    this.element = $("view").content.firstElementChild.cloneNode(true);
    this.part = (selector) => this.element.querySelector(selector);
    this.part("h2").textContent = run.title;
    this.range = this.part("input[type=range]");
    this.range.addEventListener("input", () => this.choose(Number(this.range.value), false));
    for (const button of this.element.querySelectorAll("[data-step]")) {
      button.addEventListener("click", () => this.choose(this.chosen + Number(button.dataset.step), false));
    }
    RUNS.append(this.element);
  }

  // Show what the run has gained.
  update() {
    const { rounds, problem } = this.run;
    const text = this.part(".text");
    if (!this.shown && !text.childNodes.length && this.run.text) {
      text.append(make("span", { class: "token first", title: "drawn from the prompt" }, this.prefix()));
    } else if (!this.shown && text.childNodes.length) {
      text.firstChild.textContent = this.prefix();
    }
    for (; this.shown < rounds.length; this.shown++) this.add(rounds[this.shown], this.shown);
    this.part(".problem").hidden = !problem;
    this.part(".problem").textContent = problem ?? "";
    this.facts();
    if (rounds.length && this.follows) this.choose(rounds.length - 1, true);
  }

  prefix() {
    const { rounds, text } = this.run;
    return rounds.length ? Array.from(text).slice(0, rounds[0].text_start).join("") : text;
  }

  add(round, index) {
    const drafts = round.accepted.length;
    round.output_texts.forEach((piece, i) => {
      const kind = i < drafts ? "draft" : "bonus";
      const made = i < drafts ? `${round.source}, round ${index + 1}` : `the target, round ${index + 1}`;
      const span = make("span", { class: `token ${kind}`, title: made, "data-round": index }, piece);
      span.addEventListener("click", () => this.choose(index, false));
      this.part(".text").append(span);
    });
    const bar = make("i", { title: `round ${index + 1}: ${round.output_ids.length} tokens` });
    bar.style.height = `${Math.min(100, 11 * round.output_ids.length)}%`;
    bar.classList.toggle("rest", round.source === null);
    bar.addEventListener("click", () => this.choose(index, false));
    this.part(".bars").append(bar);
    this.part(".rounds").hidden = false;
    this.range.max = index;
  }

  facts() {
    const { rounds, begun, ended } = this.run;
    const emitted = rounds.reduce((sum, round) => sum + round.output_ids.length, 0);
    const set = (name, value) => { this.part(`[data-fact=${name}]`).textContent = value; };
    if (!rounds.length) return;
    set("length", (emitted / rounds.length).toFixed(2));
    set("rounds", rounds.length);
    set("tokens", emitted + rounds[0].start);
    if (ended > begun) set("speed", (emitted / ((ended - begun) / 1000)).toFixed(1));
  }

  choose(index, follows) {
    const { rounds } = this.run;
    if (!(index >= 0 && index < rounds.length)) return;
    this.follows = follows;
    for (const old of this.element.querySelectorAll(".chosen")) old.classList.remove("chosen");
    for (const span of this.element.querySelectorAll(`[data-round="${index}"]`)) span.classList.add("chosen");
    this.part(".bars").children[index].classList.add("chosen");
    this.chosen = index;
    this.range.value = index;
    const round = rounds[index];
    const choice = round.option === null ? "" : `, the controller chose ${round.option ? `drafts (${round.option})` : "no drafts"}`;
    const who = round.source ?? "no drafts";
    this.part(".round").textContent =
      `Round ${index + 1} of ${rounds.length}: ${who}, ${round.tokens.length - 1} drafted, ` +
      `${round.accepted.length} accepted, batch of ${round.batch_size}${choice}.`;
    this.part(".tree").replaceChildren(drawTree(round));
    this.part(".table").replaceChildren(tableOf(round));
    this.times(round);
  }

  times(round) {
    const parts = [["draft", round.draft_ms], ["verify", round.verify_ms], ["host", round.host_ms]].filter((part) => part[1] !== null);
    if (!parts.length && round.round_ms !== null) parts.push(["host", round.round_ms]);
    const bars = parts.map(([name, value]) => {
      const bar = make("i", { class: name });
      bar.style.flex = `${value} 0 0`;
      return bar;
    });
    const words = parts.map(([name, value]) => {
      const word = make("span", {}, `${parts.length > 1 ? name : "in all"} ${ms(value)}`);
      word.prepend(make("i", { class: name }));
      return word;
    });
    this.part(".times").replaceChildren(...bars);
    this.part(".spent").replaceChildren(...words);
  }
}

// ---- talking to a server --------------------------------------------------------------------------

async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (held + value).split("\n\n");
    held = lines.pop();
    for (const line of lines) {
      const data = line.slice(line.indexOf("data: ") + 6);
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function body(settings, speculation) {
  const { mode, prompt, tokens, temperature, seed } = settings;
  const shared = { max_tokens: tokens, temperature, seed, stream: true, return_draft_trees: true };
  if (speculation !== null) shared.speculation = speculation;
  if (mode === "complete") return ["/v1/completions", { prompt, ...shared }];
  return ["/v1/chat/completions", { messages: [{ role: "user", content: prompt }], ...shared }];
}

const headers = () => ({ "Content-Type": "application/json", ...($("key").value ? { Authorization: `Bearer ${$("key").value}` } : {}) });

async function follow(view, base, settings, speculation, signal) {
  const { run } = view;
  const [path, content] = body(settings, speculation);
  try {
    const reply = await fetch(base + path, { method: "POST", headers: headers(), body: JSON.stringify(content), signal });
    if (!reply.ok) throw new Error(await problemOf(reply));
    for await (const event of events(reply)) {
      if (event.error) throw new Error(event.error.message);
      take(run, event);
      requestAnimationFrame(() => view.update());
    }
  } catch (error) {
    if (error.name !== "AbortError") run.problem = error.message;
  }
  view.update();
}

async function problemOf(reply) {
  if (reply.status === 401) ask("key");
  const text = await reply.text();
  try {
    const told = JSON.parse(text);
    return (told.error ?? told).message;
  } catch {
    return `${reply.status}: ${text}`;
  }
}

// The clock of a run starts with its first token: what comes before is the prompt's time.
function take(run, event) {
  const now = performance.now();
  run.begun ??= now;
  const choice = event.choices?.[0] ?? {};
  run.text += choice.text ?? choice.delta?.reasoning_content ?? choice.delta?.content ?? "";
  run.rounds.push(...(event.sglext?.draft_trees ?? []));
  run.ended = now;
}

// ---- the form -------------------------------------------------------------------------------------

let running = null;

const ask = (name) => { $(name).parentElement.hidden = false; $(name).focus(); };
const number = (name) => (($(name).value === "") ? null : Number($(name).value));

function fresh(title) {
  return new View({ title, text: "", rounds: [], begun: null, ended: null, problem: null });
}

async function start(form) {
  const settings = {
    mode: form.elements.mode.value, prompt: $("prompt").value, tokens: number("tokens") ?? 96,
    temperature: number("temperature") ?? 0, seed: number("seed") ?? 1,
  };
  const drafts = number("drafts");
  const first = drafts === null ? null : drafts === 0 ? false : { max_draft_tokens: drafts };
  const beside = $("beside").value;
  running = new AbortController();
  $("stop").disabled = false;
  $("run").disabled = true;
  RUNS.replaceChildren();
  tell("", "");
  // One after the other, so that neither takes the other's time.
  const left = fresh(drafts === 0 ? "Speculation off" : title);
  const right = beside === "off" ? fresh("Speculation off") : beside === "url" ? fresh($("url").value) : null;
  await follow(left, "", settings, first, running.signal);
  if (right !== null && !running.signal.aborted) {
    const other = beside === "url" ? $("url").value.replace(/\/+$/, "") : "";
    await follow(right, other, settings, beside === "off" ? false : first, running.signal);
    compare(left.run, right.run);
  }
  running = null;
  $("stop").disabled = true;
  $("run").disabled = false;
}

const idsOf = (run) => run.rounds.flatMap((round) => round.output_ids);

function compare(left, right) {
  if (left.problem || right.problem || running.signal.aborted) return;
  const [a, b] = [idsOf(left), idsOf(right)];
  const differs = a.findIndex((id, i) => id !== b[i]);
  if (left.text === right.text && a.length === b.length && differs < 0) tell("yes", `✓ the same text, ${a.length + 1} tokens`);
  else tell("no", `✗ the texts differ from token ${1 + Math.max(differs, 0)} on`);
}

function tell(kind, words) {
  $("same").className = kind;
  $("same").textContent = words;
}

let title = "This server";

async function greet() {
  const reply = await fetch("/server_info", { headers: headers() });
  if (!reply.ok) return problemOf(reply).then((problem) => { $("about").textContent = problem; });
  const info = await reply.json();
  title = info.speculative_algorithm ?? "No speculation";
  $("about").textContent = `${info.served_model_name} on ${info.device}, ${info.dtype}, ${title}, at most ${info.speculative_num_draft_tokens ?? 1} nodes a round`;
  if (info.speculative_algorithm === null) $("beside").value = "";
}

function listen() {
  const form = $("ask");
  form.addEventListener("submit", (event) => { event.preventDefault(); if (running === null) start(form); });
  $("stop").addEventListener("click", () => running?.abort());
  $("beside").addEventListener("change", () => {
    $("url").parentElement.hidden = $("beside").value !== "url";
    if ($("beside").value === "url") $("url").focus();
  });
  $("key").addEventListener("change", greet);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    if (event.key === "Escape") running?.abort();
  });
  greet();
}

// ---- a trace instead of a server ------------------------------------------------------------------

function replay(requests) {
  $("ask").hidden = true;
  $("about").textContent = `A trace of ${requests.length} request${requests.length === 1 ? "" : "s"}`;
  const select = $("pick").querySelector("select");
  requests.forEach((request, i) => select.append(make("option", { value: i }, `${request.rid}: ${short(visible(request.text))}`)));
  $("pick").hidden = requests.length < 2;
  const show = () => {
    RUNS.replaceChildren();
    const request = requests[Number(select.value || 0)];
    const seconds = request.rounds.reduce((sum, round) => sum + (round.round_ms ?? 0), 0);
    const view = new View({ ...request, title: request.rid, begun: 0, ended: seconds, problem: null });
    view.update();
    view.choose(0, false);
  };
  select.addEventListener("change", show);
  if (requests.length) show();
}

const trace = JSON.parse($("trace").textContent);
if (trace === null) listen();
else replay(trace);
