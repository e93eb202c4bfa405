// The table of chains: filters in the address, rows loaded as they are scrolled into view.

import { get } from "./api.js";
import { el, link, listed, number, plural, seconds } from "./dom.js";

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

export function stepName(row) {
  if (row.step === null) return "–";
  return row.held_out ? `eval ${row.step}` : String(row.step);
}

export function rewardCell(reward) {
  const kind = reward === null ? "none" : reward > 0.5 ? "high" : reward > 0 ? "middle" : "low";
  return el("span", { class: `reward ${kind}` }, reward === null ? "none" : number(reward, 2));
}

export async function chainsPage(page, query, state) {
  const { sources, facets, ...found } = await get("runs");
  let progress = found.progress;
  const controls = el("section", { class: "filters" });
  const head = el("div", { class: "row head" });
  const body = el("div", { class: "rows" });
  const view = el("div", { class: "table", tabIndex: 0 }, head, body);
  const count = el("span", { class: "faint", id: "count" });
  page.replaceChildren(el("section", { class: "toolbar" }, el("h1", null, "Chains"), count), controls, view);
  let total = 0;
  let pages = new Map();
  let generation = 0;
  let selected = state.list && sameQuery(state.list.query, query) ? state.list.at : 0;

  function go(change) {
    const next = Object.entries({ ...query, ...change }).filter(([, value]) => value !== "");
    location.hash = `#/chains?${new URLSearchParams(next)}`;
  }

  function choice(name, label, options) {
    const all = el("option", { value: "" }, label);
    const select = el(
      "select",
      {
        "aria-label": label,
        class: query[name] ? "set" : "",
        onchange: () => go(name === "when" ? splitStep(select.value) : { [name]: select.value }),
      },
      all,
      options.map(([value, text]) => el("option", { value }, text)),
    );
    select.value =
      name === "when"
        ? query.step
          ? `${query.held_out ?? 0} ${query.step}`
          : query.held_out === "1"
            ? "1"
            : ""
        : (query[name] ?? "");
    if (select.value) select.className = "set";
    return select;
  }

  function entry(name, label, type = "text", size = 8) {
    return el("input", {
      type,
      size,
      placeholder: label,
      "aria-label": label,
      value: query[name] ?? "",
      step: "any",
      id: `filter-${name}`,
      class: query[name] ? "set" : "",
      onchange: (event) => go({ [name]: event.target.value.trim() }),
    });
  }

  const steps = query.source ? (facets.steps[query.source] ?? []) : Object.values(facets.steps).flat();
  const when = new Map([["1", "all evaluations"]]);
  for (const [step, held, chains] of steps)
    if (step !== null) when.set(`${held} ${step}`, `${held ? "eval" : "step"} ${step} (${number(chains)})`);
  controls.replaceChildren(
    sources.length > 1
      ? choice(
          "source",
          "all runs",
          sources.map((run) => [String(run.id), run.name]),
        )
      : "",
    choice("when", "all steps", [...when]),
    entry("group", "group"),
    entry("task", "task id", "text", 10),
    entry("min_reward", "reward from", "number"),
    entry("max_reward", "reward to", "number"),
    choice(
      "stop",
      "any stop reason",
      facets.stop.map((each) => [each, each]),
    ),
    choice("tool", "any tool", [["*", "some tool"], ...facets.tool.map((each) => [each, each])]),
    choice("failure", "any outcome", [
      ["*", "some failure"],
      ...facets.failure.map((each) => [each, `failure: ${each}`]),
    ]),
    choice("trained", "trained or not", [
      ["1", "trained"],
      ["0", "not trained"],
    ]),
    entry("text", "search text  ( / )", "search", 22),
    Object.keys(query).length
      ? el("button", { class: "ghost", onclick: () => (location.hash = "#/chains") }, "clear")
      : "",
  );
  head.replaceChildren(
    ...COLUMNS.map(([label, sort]) => {
      const active = (query.sort ?? "order") === sort;
      const arrow = active ? (query.descending ? " ↓" : " ↑") : "";
      const flip = () => go({ sort, descending: active && !query.descending ? "1" : "" });
      return sort
        ? el("button", { onclick: flip, class: active ? "set" : "" }, label + arrow)
        : el("span", null, label);
    }),
  );

  function rowElement(row, index) {
    const open = () => {
      state.list = { query, at: index, total };
      location.hash = `#/chain/${row.id}`;
    };
    const bad = row.bad_calls ? el("span", { class: "bad" }, number(row.bad_calls)) : "";
    const failure = listed(row.failure).join(", ");
    const run =
      sources.length > 1
        ? el("i", {
            class: `swatch c${(row.source - 1) % 8}`,
            title: sources.find((each) => each.id === row.source)?.name,
          })
        : "";
    const node = el(
      "div",
      { class: `row${index === selected ? " selected" : ""}`, onclick: open, role: "link" },
      el("span", null, run, stepName(row)),
      el("span", null, link(`#/chain/${row.id}`, `${row.grp}/${row.chain}`)),
      el("span", { title: row.task }, row.task),
      rewardCell(row.reward),
      el("span", { class: failure ? "bad" : "", title: failure }, row.stop),
      el("span", null, number(row.turns)),
      el("span", null, number(row.calls)),
      el("span", null, bad),
      el("span", null, number(row.sampled)),
      el("span", null, seconds(row.seconds)),
      el("span", null, listed(row.tools).join(", ")),
      el("span", { class: "preview" }, row.preview),
    );
    node.style.top = `${index * ROW}px`;
    return node;
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
    count.textContent =
      plural(total, "chain") + (progress < 1 ? `, reading files (${Math.round(progress * 100)} %)` : "");
    body.style.height = `${total * ROW}px`;
    const first = Math.max(Math.floor(view.scrollTop / ROW) - 10, 0);
    const last = Math.min(first + Math.ceil(view.clientHeight / ROW) + 20, total);
    const rows = [];
    for (let index = first; index < last; index++) {
      const row = pages.get(Math.floor(index / PAGE))?.[index % PAGE];
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
    Enter: () => {
      const row = pages.get(Math.floor(selected / PAGE))?.[selected % PAGE];
      if (!row) return;
      state.list = { query, at: selected, total };
      location.hash = `#/chain/${row.id}`;
    },
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
