// One chain: its conversation, its tokens, its tool calls, and why a token is trained or not.

import { get } from "./api.js";
import { rewardCell, stepName } from "./chains.js";
import { conversation } from "./conversation.js";
import { append, el, link, number, plural, seconds, visible } from "./dom.js";

const COLORS = ["author", "mask", "advantage", "log-probability", "ratio"];

export async function chainPage(page, id, state) {
  const chain = await get("chain", { id });
  const others = chain.task
    ? (await get("chains", { task: chain.task, held_out: chain.held_out, limit: 500 })).rows
    : [];
  const names = new Map((await get("runs")).sources.map((run) => [run.id, run.name]));
  const why = el("aside", { class: "card why" });
  const strip = el("div", { class: "strip" });
  const legendLine = el("p", { class: "legend small" });
  const colors = el(
    "select",
    { "aria-label": "Color of tokens", onchange: () => color(colors.value) },
    COLORS.map((each) => el("option", { value: each }, each)),
  );
  const calls = callTable(chain);
  page.replaceChildren(
    el(
      "section",
      { class: "toolbar" },
      el("h1", null, `Chain ${chain.grp}/${chain.chain}`),
      rewardCell(chain.reward),
      el("span", { class: "grow" }),
      navigation(chain, state),
    ),
    summary(chain),
    el(
      "section",
      { class: "columns" },
      el("div", null, el("h2", null, "Conversation"), conversation(chain)),
      el(
        "div",
        null,
        el("h2", null, "Tokens", el("span", { class: "grow" }), el("label", { class: "small" }, "color by ", colors)),
        legendLine,
        strip,
        why,
        calls,
        taskColumns(chain),
      ),
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
  const step = (by) => () => move(state, chain, by);
  state.keys = {
    j: step(1),
    k: step(-1),
    g: () => (location.hash = `#/compare/${chain.group_ids.slice(0, 16).join(",")}`),
    c: () => {
      colors.value = COLORS[(COLORS.indexOf(colors.value) + 1) % COLORS.length];
      color(colors.value);
    },
    p: () => strip.querySelectorAll("details").forEach((each) => each.toggleAttribute("open")),
    u: () => (location.hash = `#/chains?${new URLSearchParams(state.list?.query ?? {})}`),
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
    list.at = Math.max(
      rows.findIndex((row) => row.id === chain.id),
      0,
    );
  }
  const at = list.at + by;
  if (at < 0) return;
  const [row] = (await get("chains", { ...list.query, offset: at, limit: 1 })).rows;
  if (!row) return;
  list.at = at;
  location.hash = `#/chain/${row.id}`;
}

function navigation(chain, state) {
  const group =
    chain.group_ids.length > 1
      ? link(`#/compare/${chain.group_ids.slice(0, 16).join(",")}`, `group of ${chain.group_ids.length}`)
      : "";
  return el(
    "nav",
    { class: "small" },
    link(`#/chains?${new URLSearchParams(state.list?.query ?? {})}`, "list"),
    group,
    el("button", { onclick: () => move(state, chain, -1), title: "Previous chain (k)" }, "←"),
    el("button", { onclick: () => move(state, chain, 1), title: "Next chain (j)" }, "→"),
  );
}

export function summary(chain) {
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
  ];
  if (chain.attempts > 1) facts.push(["attempts", number(chain.attempts)]);
  const node = el(
    "dl",
    { class: "facts" },
    facts.map(([name, value]) => el("div", null, el("dt", null, name), el("dd", null, value))),
  );
  const metrics = Object.entries(chain.score?.[2] ?? {});
  if (chain.score?.[1])
    append(node, [
      el(
        "div",
        null,
        el("dt", null, "reward per turn"),
        el("dd", null, chain.score[1].map((each) => number(each, 2)).join(", ")),
      ),
    ]);
  if (metrics.length)
    append(node, [
      el(
        "div",
        null,
        el("dt", null, "reward's figures"),
        el(
          "dd",
          null,
          metrics
            .map(([name, value]) => `${name} ${typeof value === "number" ? number(value) : JSON.stringify(value)}`)
            .join(", "),
        ),
      ),
    ]);
  return el(
    "div",
    null,
    node,
    chain.failures.map(([kind, message, turn, attempt]) =>
      el(
        "p",
        { class: "alarm" },
        el("b", null, `${kind} failure`),
        ` in turn ${turn + 1}${attempt ? `, attempt ${attempt + 1}` : ""}: `,
        message,
      ),
    ),
    chain.tokenizer_problem ? el("p", { class: "note" }, chain.tokenizer_problem) : "",
  );
}

function callTable(chain) {
  const rows = chain.turn_records.flatMap(([, calls], turn) => calls.map((call) => [turn, ...call]));
  if (!rows.length) return "";
  return el(
    "details",
    { open: true },
    el("summary", null, plural(rows.length, "tool call")),
    el(
      "table",
      { class: "calls" },
      el(
        "tr",
        null,
        ["turn", "tool", "outcome", "time", "retries", "info"].map((name) => el("th", null, name)),
      ),
      rows.map(([turn, name, status, time, info, retries]) =>
        el(
          "tr",
          null,
          el("td", null, turn + 1),
          el("td", null, name),
          el("td", { class: status === "ok" ? "" : "bad" }, status),
          el("td", null, seconds(time)),
          el("td", null, retries || ""),
          el("td", { class: "wrap" }, Object.keys(info).length ? JSON.stringify(info) : ""),
        ),
      ),
    ),
  );
}

function taskColumns(chain) {
  if (!Object.keys(chain.columns).length) return "";
  return el(
    "details",
    null,
    el("summary", null, "Task columns"),
    el("pre", null, JSON.stringify(chain.columns, null, 1)),
  );
}

// Chains of the same task at other steps, and in other runs or evaluations that are shown.
function comparison(chain, others, names) {
  const isOther = (row) => row.source !== chain.source || row.step !== chain.step;
  const same = others.filter((row) => isOther(row) && row.chain === chain.chain);
  if (!same.length) return "";
  const isBefore = (row) => row.source < chain.source || (row.source === chain.source && row.step < chain.step);
  const name = (row) => (row.source === chain.source ? "" : `${names.get(row.source)} `);
  return el(
    "section",
    { class: "card" },
    el("h2", null, "The same task elsewhere"),
    same
      .slice(0, 40)
      .map((row) =>
        link(
          `#/compare/${isBefore(row) ? `${row.id},${chain.id}` : `${chain.id},${row.id}`}?diff=1`,
          el("span", { class: "chip" }, name(row), row.step === null ? "" : `${stepName(row)} `, rewardCell(row.reward)),
        ),
      ),
  );
}

const LEGENDS = {
  mask: "highlighted: trained",
  advantage: "green: positive, red: negative",
  "log-probability": "red: improbable when it was sampled",
  ratio: "green: more probable for the learner than for the sampler, red: less",
};

function legend(by) {
  if (by !== "author") return [LEGENDS[by]];
  return ["task", "model", "tool", "user", "history", "template"].map((author) =>
    el("span", null, el("i", { class: `swatch a-${author}` }), author),
  );
}

function fillStrip(strip, chain, why) {
  const tip = document.getElementById("tip");
  chain.segments.forEach((segment, index) => {
    if (chain.segments.length > 1) strip.append(el("h3", null, `Segment ${index + 1} of ${chain.segments.length}`));
    const line = el("div", { class: "tokens" });
    segment.spans.forEach((span, at) => {
      const fold = span.author === "task" || span.author === "history";
      const holder = el("span", { class: `span a-${span.author}` });
      const fill = () =>
        holder.childElementCount || holder.append(...span.ids.map((id, i) => tokenElement(chain, index, at, i)));
      if (fold && span.ids.length) {
        line.append(
          el(
            "details",
            { class: `fold a-${span.author}`, ontoggle: fill },
            el(
              "summary",
              null,
              `${span.author === "task" ? "prompt" : "history"}, ${plural(span.ids.length, "token")}`,
            ),
            holder,
          ),
        );
      } else {
        fill();
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
    tip.style.left = `${Math.min(box.left, innerWidth - tip.offsetWidth - 12)}px`;
    tip.style.top = `${box.bottom + 6 + tip.offsetHeight > innerHeight ? box.top - tip.offsetHeight - 6 : box.bottom + 6}px`;
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
  const node = el(
    "span",
    { class: `token${i === 0 ? " first" : ""}${isTrained({ span, i }) ? " trained" : ""}` },
    shown === "" ? "·" : shown,
  );
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
  const value =
    by === "advantage"
      ? (span.advantages?.[i] ?? null)
      : by === "log-probability"
        ? (span.logprobs?.[i] ?? null)
        : by === "ratio"
          ? ratioOf(token.place)
          : null;
  const distance =
    value === null ? 0 : by === "ratio" ? Math.log(value) * 4 : by === "log-probability" ? value / 3 : value / 1.5;
  const strength = Math.round(Math.min(Math.abs(distance), 1) * 60);
  token.style.background =
    by === "author" || by === "mask" || !strength
      ? ""
      : `color-mix(in srgb, var(--${distance > 0 ? "good" : "bad"}) ${strength}%, transparent)`;
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
  return el(
    "table",
    null,
    rows.map(([name, value]) => el("tr", null, el("th", null, name), el("td", null, value))),
  );
}

function explain(why, chain, place) {
  if (!place) {
    why.replaceChildren(
      el("h3", null, chain.trained ? "This chain is trained" : "This chain is not trained"),
      ...chain.why.map((rule) => el("p", null, rule)),
      el("p", { class: "faint" }, "Click on a token to see why it is trained or not."),
    );
    return;
  }
  const { span, i, segment, at } = place;
  const trained = isTrained(place);
  const zero = trained && span.advantages && span.advantages[i] === 0;
  const title = !trained
    ? "Why is this token not trained?"
    : zero
      ? "Trained, with advantage 0"
      : "Why is this token trained?";
  why.replaceChildren(
    el("h3", null, title),
    el(
      "p",
      null,
      el("code", null, span.texts ? span.texts[i] : span.ids[i]),
      " was written by ",
      el("b", null, span.author),
      ` in turn ${span.turn + 1}: token ${i + 1} of ${span.ids.length} in span ${at + 1}`,
      ` of ${chain.segments[segment].spans.length}`,
      chain.segments.length > 1 ? `, segment ${segment + 1}.` : ".",
    ),
    el(
      "ol",
      null,
      span.why.map((rule) => el("li", null, rule)),
      span.masked[i] ? el("li", null, span.masked[i]) : "",
      zero ? el("li", null, "An advantage of 0 gives no gradient: the return equals the baseline.") : "",
    ),
    figures(place),
  );
}
