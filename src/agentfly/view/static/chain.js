// One chain: its conversation, its tokens, its tool calls, and why a token is trained or not.

import { get } from "./api.js";
import { chainName, rewardCell, stepName } from "./chains.js";
import { conversation } from "./conversation.js";
import { el, elWith, link, number, options, plural, seconds, visible } from "./dom.js";

const COLORS = ["author", "mask", "advantage", "log-probability", "ratio"];
const LEGENDS = {
  mask: "highlighted: trained",
  advantage: "green: positive, red: negative",
  "log-probability": "red: improbable when it was sampled",
  ratio: "green: more probable for the learner than for the sampler, red: less",
};

export async function chainPage(page, { ids: [id], state }) {
  const chain = await get("chain", { id });
  const others = (await get("chains", { digest: chain.digest, held_out: chain.held_out, limit: 500 })).rows;
  const names = new Map((await get("runs")).sources.map((run) => [run.id, run.name]));
  const why = el("aside.card.why");
  const strip = el("div.strip");
  const legendLine = el("p.legend.small");
  const choice = { "aria-label": "Color of tokens", onchange: () => color(colors.value) };
  const colors = elWith("select", choice, options(COLORS.map((each) => [each, each])));
  const coloring = el("label.small", "color by ", colors);
  const tokens = [el("h2", "Tokens", el("span.grow"), coloring), legendLine, strip, why];
  const title = el("h1", `Chain ${chainName(chain)}`);
  page.replaceChildren(
    el("section.toolbar", title, rewardCell(chain.reward), el("span.grow"), navigation(chain, state)),
    summary(chain),
    el(
      "section.columns",
      el("div", el("h2", "Conversation"), conversation(chain)),
      el("div", tokens, callTable(chain), taskColumns(chain)),
    ),
    comparison(chain, others, names),
  );
  fillStrip(strip, chain, why);
  explain(why, chain, null);

  function color(by) {
    state.color = by;
    strip.dataset.color = by;
    legendLine.replaceChildren(...legend(by));
    for (const token of strip.querySelectorAll(".token")) paint(token, by);
  }
  colors.value = state.color ?? "author";
  color(colors.value);
  state.keys = {
    j: () => move(state, chain, 1),
    k: () => move(state, chain, -1),
    g: () => (location.hash = groupAddress(chain)),
    c: () => {
      colors.value = COLORS[(COLORS.indexOf(colors.value) + 1) % COLORS.length];
      color(colors.value);
    },
    p: () => strip.querySelectorAll("details").forEach((each) => each.toggleAttribute("open")),
    u: () => (location.hash = listAddress(state)),
  };
  return null;
}

async function move(state, chain, by) {
  const list = (state.list ??= {
    query: { source: chain.source, ...(chain.step === null ? {} : { step: chain.step, held_out: chain.held_out }) },
    at: null,
  });
  if (list.at === null) {
    const rows = (await get("chains", { ...list.query, limit: 1000 })).rows;
    const found = rows.findIndex((row) => row.id === chain.id);
    list.at = Math.max(found, 0);
  }
  const at = list.at + by;
  if (at < 0) return;
  const [row] = (await get("chains", { ...list.query, offset: at, limit: 1 })).rows;
  if (!row) return;
  list.at = at;
  location.hash = `#/chain/${row.id}`;
}

function listAddress(state) {
  return `#/chains?${new URLSearchParams(state.list?.query ?? {})}`;
}

function groupAddress(chain) {
  return `#/compare/${chain.group_ids.slice(0, 16).join(",")}`;
}

function navigation(chain, state) {
  const size = chain.group_ids.length;
  return el(
    "nav.small",
    link(listAddress(state), "list"),
    size > 1 ? link(groupAddress(chain), `group of ${size}`) : "",
    elWith("button", { onclick: () => move(state, chain, -1), title: "Previous chain (k)" }, "←"),
    elWith("button", { onclick: () => move(state, chain, 1), title: "Next chain (j)" }, "→"),
  );
}

function summary(chain) {
  const { per_turn: perTurn, metrics } = chain.score ?? {};
  const metric = ([name, value]) => `${name} ${typeof value === "number" ? number(value) : JSON.stringify(value)}`;
  const facts = [
    ["run", link(`#/chains?source=${chain.source}`, chain.source_name)],
    ["step", stepName(chain)],
    ["task", chain.task || "–"],
    ["stop", chain.stop],
    ["turns", number(chain.turns)],
    ["tokens", `${number(chain.sampled)} sampled of ${number(chain.tokens)}`],
    ["time", seconds(chain.seconds)],
    ["treatment", chain.treatment],
    ["trained", chain.trained ? "yes" : "no"],
    ["attempts", chain.attempts > 1 ? number(chain.attempts) : ""],
    ["reward per turn", (perTurn ?? []).map((each) => number(each, 2)).join(", ")],
    ["reward's figures", Object.entries(metrics ?? {}).map(metric).join(", ")],
  ].filter(([, value]) => value !== "");
  const failures = chain.failures.map(({ kind, message, turn, attempt }) => {
    const place = ` in turn ${turn + 1}${attempt ? `, attempt ${attempt + 1}` : ""}: `;
    return el("p.alarm", el("b", `${kind} failure`), place, message);
  });
  return el(
    "div",
    el("dl.facts", facts.map(([name, value]) => el("div", el("dt", name), el("dd", value)))),
    failures,
    chain.tokenizer_problem ? el("p.note", chain.tokenizer_problem) : "",
  );
}

function callTable(chain) {
  const calls = chain.turn_records.flatMap((record, turn) => record.calls.map((call) => ({ turn, ...call })));
  if (!calls.length) return "";
  const columns = ["turn", "tool", "outcome", "time", "retries", "info"].map((name) => el("th", name));
  const rows = calls.map(({ turn, name, status, seconds: time, info, retries, repeated }) => {
    const outcome = el(status === "ok" ? "td" : "td.bad", status, repeated ? ", repeated" : "");
    const details = el("td.wrap", info ? JSON.stringify(info) : "");
    const times = [el("td", seconds(time)), el("td", retries || "")];
    return el("tr", el("td", turn + 1), el("td", name), outcome, times, details);
  });
  const table = el("table.calls", el("tr", columns), rows);
  return elWith("details", { open: true }, el("summary", plural(calls.length, "tool call")), table);
}

function taskColumns(chain) {
  if (!Object.keys(chain.columns).length) return "";
  return el("details", el("summary", "Task columns"), el("pre", JSON.stringify(chain.columns, null, 1)));
}

// Chains of the same task at other steps, and in other runs or evaluations that are shown.
function comparison(chain, others, names) {
  const isOther = (row) => row.source !== chain.source || row.step !== chain.step;
  const same = others.filter((row) => isOther(row) && row.chain === chain.chain);
  if (!same.length) return "";
  const isBefore = (row) => row.source < chain.source || (row.source === chain.source && row.step < chain.step);
  const chips = same.slice(0, 40).map((row) => {
    const run = row.source === chain.source ? "" : `${names.get(row.source)} `;
    const step = row.step === null ? "" : `${stepName(row)} `;
    const pair = isBefore(row) ? `${row.id},${chain.id}` : `${chain.id},${row.id}`;
    return link(`#/compare/${pair}?diff=1`, el("span.chip", run, step, rewardCell(row.reward)));
  });
  return el("section.card", el("h2", "The same task elsewhere"), chips);
}

function legend(by) {
  if (by !== "author") return [LEGENDS[by]];
  const authors = ["task", "model", "tool", "user", "history", "template"];
  return authors.map((author) => el("span", el(`i.swatch.a-${author}`), author));
}

function fillStrip(strip, chain, why) {
  const tip = document.getElementById("tip");
  chain.segments.forEach((segment, index) => {
    if (chain.segments.length > 1) strip.append(el("h3", `Segment ${index + 1} of ${chain.segments.length}`));
    const line = el("div.tokens");
    segment.spans.forEach((span, at) => {
      const holder = el(`span.span.a-${span.author}`);
      const ontoggle = () =>
        holder.childElementCount || holder.append(...span.ids.map((_, i) => tokenElement(chain, index, at, i)));
      if ((span.author === "task" || span.author === "history") && span.ids.length) {
        const name = `${span.author === "task" ? "prompt" : "history"}, ${plural(span.ids.length, "token")}`;
        line.append(elWith(`details.fold.a-${span.author}`, { ontoggle }, el("summary", name), holder));
      } else {
        ontoggle();
        line.append(holder);
      }
    });
    strip.append(line);
  });
  strip.addEventListener("pointerover", (event) => {
    const token = event.target.closest(".token");
    tip.hidden = !token;
    if (!token) return;
    tip.replaceChildren(figures(token.place));
    const box = token.getBoundingClientRect();
    const below = box.bottom + 6;
    tip.style.left = `${Math.min(box.left, innerWidth - tip.offsetWidth - 12)}px`;
    tip.style.top = `${below + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : below}px`;
  });
  strip.addEventListener("pointerleave", () => (tip.hidden = true));
  strip.addEventListener("click", (event) => {
    const token = event.target.closest(".token");
    if (!token) return;
    strip.querySelector(".token.chosen")?.classList.remove("chosen");
    token.classList.add("chosen");
    explain(why, chain, token.place);
  });
}

function tokenElement(chain, segment, at, i) {
  const span = chain.segments[segment].spans[at];
  const text = span.texts ? span.texts[i] : String(span.ids[i]);
  const shown = visible(text).replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
  const classes = `${i === 0 ? ".first" : ""}${isTrained({ span, i }) ? ".trained" : ""}`;
  const node = el(`span.token${classes}`, shown === "" ? "·" : shown);
  node.place = { span, i, segment, at, step: chain.held_out ? null : chain.step };
  return node;
}

function isTrained({ span, i }) {
  return span.trained && !span.masked[i];
}

function ratioOf({ span, i }) {
  return span.learner && span.learner[i] !== null ? Math.exp(span.learner[i] - span.logprobs[i]) : null;
}

// Green above and red below the neutral value; the strength grows with the distance.
function paint(token, by) {
  const { span, i } = token.place;
  const distance = {
    author: 0,
    mask: 0,
    advantage: (span.advantages?.[i] ?? 0) / 1.5,
    "log-probability": (span.logprobs?.[i] ?? 0) / 3,
    ratio: Math.log(ratioOf(token.place) ?? 1) * 4,
  }[by];
  const strength = Math.round(Math.min(Math.abs(distance), 1) * 60);
  const color = `color-mix(in srgb, var(--${distance > 0 ? "good" : "bad"}) ${strength}%, transparent)`;
  token.style.background = strength ? color : "";
}

function maskOf({ span, i }) {
  if (!span.logprobs) return "0";
  if (!span.trained) return "1, but the chain is not trained";
  return span.masked[i] ? "1, but removed by the importance mask" : "1, trained";
}

function figures({ span, i, segment, step }) {
  const rows = [
    ["token", `${span.ids[i]} at ${span.start + i}${segment ? ` of segment ${segment + 1}` : ""}`],
    ["author", span.author],
    ["turn", span.turn + 1],
    ["mask", maskOf({ span, i })],
  ];
  if (span.logprobs) {
    const ratio = ratioOf({ span, i });
    rows.push(
      ["log p, sampler", number(span.logprobs[i], 4)],
      ["log p, learner", span.learner ? number(span.learner[i], 4) : "not stored"],
      ["ratio", ratio === null ? "–" : number(ratio, 4)],
      ["advantage", span.advantages ? number(span.advantages[i], 4) : "none"],
      ["weight version", number(span.version)],
    );
    if (step !== null) rows.push(["staleness", plural(step - 1 - span.version, "update")]);
  }
  return el("table", rows.map(([name, value]) => el("tr", el("th", name), el("td", value))));
}

function explain(why, chain, place) {
  if (!place) {
    why.replaceChildren(
      el("h3", chain.trained ? "This chain is trained" : "This chain is not trained"),
      ...chain.why.map((rule) => el("p", rule)),
      el("p.faint", "Click on a token to see why it is trained or not."),
    );
    return;
  }
  const { span, i, segment, at } = place;
  const trained = isTrained(place);
  const zero = trained && span.advantages && span.advantages[i] === 0;
  const title = zero ? "Trained, with advantage 0" : `Why is this token ${trained ? "" : "not "}trained?`;
  const origin =
    ` in turn ${span.turn + 1}: token ${i + 1} of ${span.ids.length} in span ${at + 1}` +
    ` of ${chain.segments[segment].spans.length}${chain.segments.length > 1 ? `, segment ${segment + 1}.` : "."}`;
  const noGradient = zero && "An advantage of 0 gives no gradient: the return equals the baseline.";
  why.replaceChildren(
    el("h3", title),
    el("p", el("code", span.texts ? span.texts[i] : span.ids[i]), " was written by ", el("b", span.author), origin),
    el("ol", [...span.why, span.masked[i], noGradient].filter(Boolean).map((rule) => el("li", rule))),
    figures(place),
  );
}
