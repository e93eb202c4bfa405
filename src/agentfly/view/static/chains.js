// The table of chains: filters in the address, rows loaded as they are scrolled into view.

import { get } from "./api.js";
import { el, elWith, link, listed, number, options, plural, seconds } from "./dom.js";

const ROW = 30; // height of a row in pixels, as in style.css
const PAGE = 100;
const COLUMNS = [
  ["step", "order"],
  ["chain", null],
  ["task", null],
  ["reward", "reward"],
  ["stop", null],
  ["turns", "turns"],
  ["calls", "calls"],
  ["failed", "bad_calls"],
  ["tokens", "sampled"],
  ["time", "seconds"],
  ["tools", null],
  ["answer", null],
];

export function chainName(row) {
  return `${row.grp}/${row.chain}${row.greedy ? " greedy" : ""}`;
}

export function stepName(row) {
  if (row.step === null) return "–";
  return row.held_out ? `eval ${row.step}` : String(row.step);
}

export function rewardCell(reward) {
  const kind = reward === null ? "none" : reward > 0.5 ? "high" : reward > 0 ? "middle" : "low";
  return el(`span.reward.${kind}`, reward === null ? "none" : number(reward, 2));
}

export async function chainsPage(page, { query, state }) {
  const { sources, facets, ...found } = await get("runs");
  let progress = found.progress;
  const body = el("div.rows");
  const count = elWith("span.faint", { id: "count" });
  let total = 0;
  let pages = new Map();
  let generation = 0;
  let selected = state.list && sameQuery(state.list.query, query) ? state.list.at : 0;

  function go(change) {
    const next = Object.entries({ ...query, ...change }).filter(([, value]) => value !== "");
    location.hash = `#/chains?${new URLSearchParams(next)}`;
  }

  function choice(name, label, values) {
    const when = query.step ? `${query.held_out ?? 0} ${query.step}` : query.held_out === "1" ? "1" : "";
    const onchange = () => go(name === "when" ? splitStep(select.value) : { [name]: select.value });
    const select = elWith("select", { "aria-label": label, onchange }, options([["", label], ...values]));
    select.value = name === "when" ? when : (query[name] ?? "");
    if (select.value) select.className = "set";
    return select;
  }

  function entry(name, label, type = "text", size = 8) {
    const onchange = (event) => go({ [name]: event.target.value.trim() });
    const value = query[name] ?? "";
    const more = { "aria-label": label, value, step: "any", id: `filter-${name}`, onchange };
    return elWith(value ? "input.set" : "input", { type, size, placeholder: label, ...more });
  }

  const steps = query.source ? (facets.steps[query.source] ?? []) : Object.values(facets.steps).flat();
  const when = new Map([["1", "all evaluations"]]);
  for (const [step, held, chains] of steps)
    if (step !== null) when.set(`${held} ${step}`, `${held ? "eval" : "step"} ${step} (${number(chains)})`);
  const trained = [
    ["1", "trained"],
    ["0", "not trained"],
  ];
  const pairs = (values, prefix = "") => values.map((each) => [each, prefix + each]);
  const clear = () => (location.hash = "#/chains");
  const controls = el(
    "section.filters",
    sources.length > 1 ? choice("source", "all runs", sources.map((run) => [String(run.id), run.name])) : "",
    choice("when", "all steps", [...when]),
    entry("group", "group"),
    entry("task", "task id", "text", 10),
    entry("min_reward", "reward from", "number"),
    entry("max_reward", "reward to", "number"),
    choice("stop", "any stop reason", pairs(facets.stop)),
    choice("tool", "any tool", [["*", "some tool"], ...pairs(facets.tool)]),
    choice("failure", "any outcome", [["*", "some failure"], ...pairs(facets.failure, "failure: ")]),
    choice("trained", "trained or not", trained),
    entry("text", "search text  ( / )", "search", 22),
    Object.keys(query).length ? elWith("button.ghost", { onclick: clear }, "clear") : "",
  );
  const titles = COLUMNS.map(([label, sort]) => {
    const active = (query.sort ?? "order") === sort;
    const arrow = active ? (query.descending ? " ↓" : " ↑") : "";
    const onclick = () => go({ sort, descending: active && !query.descending ? "1" : "" });
    return sort ? elWith(active ? "button.set" : "button", { onclick }, label + arrow) : el("span", label);
  });
  const view = elWith("div.table", { tabIndex: 0 }, el("div.row.head", titles), body);
  page.replaceChildren(el("section.toolbar", el("h1", "Chains"), count), controls, view);

  function open(row, index) {
    state.list = { query, at: index, total };
    location.hash = `#/chain/${row.id}`;
  }

  function rowElement(row, index) {
    const failure = listed(row.failure).join(", ");
    const title = sources.find((each) => each.id === row.source)?.name;
    const run = sources.length > 1 ? elWith(`i.swatch.c${(row.source - 1) % 8}`, { title }) : "";
    const node = elWith(
      index === selected ? "div.row.selected" : "div.row",
      { onclick: () => open(row, index), role: "link" },
      el("span", run, stepName(row)),
      el("span", link(`#/chain/${row.id}`, chainName(row))),
      elWith("span", { title: row.task }, row.task),
      rewardCell(row.reward),
      elWith(failure ? "span.bad" : "span", { title: failure }, row.stop),
      el("span", number(row.turns)),
      el("span", number(row.calls)),
      el("span", row.bad_calls ? el("span.bad", number(row.bad_calls)) : ""),
      el("span", number(row.sampled)),
      el("span", seconds(row.seconds)),
      el("span", listed(row.tools).join(", ")),
      el("span.preview", row.preview),
    );
    node.style.top = `${index * ROW}px`;
    return node;
  }

  function rowAt(index) {
    return pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  }

  async function load(number) {
    if (pages.has(number)) return;
    pages.set(number, []);
    const mine = generation;
    const found = await get("chains", { ...query, offset: number * PAGE, limit: PAGE });
    if (mine !== generation) return;
    total = found.total;
    pages.set(number, found.rows);
    draw();
  }

  function draw() {
    const reading = progress < 1 ? `, reading files (${Math.round(progress * 100)} %)` : "";
    count.textContent = plural(total, "chain") + reading;
    body.style.height = `${total * ROW}px`;
    const first = Math.max(Math.floor(view.scrollTop / ROW) - 10, 0);
    const last = Math.min(first + Math.ceil(view.clientHeight / ROW) + 20, total);
    const rows = [];
    for (let index = first; index < last; index++) {
      const row = rowAt(index);
      if (row) rows.push(rowElement(row, index));
      else load(Math.floor(index / PAGE));
    }
    body.replaceChildren(...rows);
  }

  function move(by) {
    selected = Math.min(Math.max(selected + by, 0), total - 1);
    const top = selected * ROW;
    if (top < view.scrollTop || top + 3 * ROW > view.scrollTop + view.clientHeight)
      view.scrollTop = top - view.clientHeight / 2;
    draw();
  }

  let waiting = false;
  view.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  });
  state.keys = {
    j: () => move(1),
    k: () => move(-1),
    Enter: () => rowAt(selected) && open(rowAt(selected), selected),
    "/": () => document.getElementById("filter-text").focus(),
  };
  await load(Math.floor(selected / PAGE));
  if (selected) move(0);
  // While a run goes on, only the number of chains and the rows in view are loaded again.
  return async () => {
    if (progress < 1) progress = (await get("runs")).progress;
    const found = await get("chains", { ...query, limit: 1 });
    if (found.total === total) return draw();
    generation += 1;
    pages = new Map();
    await load(Math.floor(view.scrollTop / ROW / PAGE));
  };
}

function splitStep(value) {
  const [held, step] = value.split(" ");
  return { held_out: held, step: step ?? "" };
}

function sameQuery(a, b) {
  return new URLSearchParams(a).toString() === new URLSearchParams(b).toString();
}
