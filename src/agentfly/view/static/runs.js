// The runs, and curves of their metrics; several runs are drawn into one chart.

import { exported, get } from "./api.js";
import { chart } from "./chart.js";
import { append, el, link, number } from "./dom.js";

// Charts of the first page: title, and metrics that belong together.
const CHARTS = [
  ["Reward", ["reward/mean", "eval/reward", "eval/greedy"]],
  ["Turns and calls per chain", ["chain/turns", "calls/chain"]],
  ["Calls that failed", ["calls/invalid_rate", "calls/unknown_rate", "calls/error_rate"]],
  ["Entropy", ["policy/entropy"]],
  ["Staleness", ["policy/staleness", "policy/staleness_max"]],
  ["Sampler and learner", ["policy/mismatch_kl"]],
  ["Environments", ["environments/leased", "environments/waiting"]],
  ["Groups without variance", ["group/zero_variance"]],
];

export async function runsPage(page, query, state) {
  const hidden = (state.hidden ??= new Set());
  const cards = el("div", { class: "charts" });
  const list = el("div", { class: "runs" });
  const smoothing = el("input", {
    type: "range",
    min: 0,
    max: 0.98,
    step: 0.02,
    value: state.smooth ?? 0,
    oninput: () => draw(),
  });
  const metrics = el("datalist", { id: "metric-names" });
  const search = el("input", {
    type: "search",
    placeholder: "add a metric: policy/grad_norm",
    list: "metric-names",
    "aria-label": "Metric",
    onchange: () => add(search.value),
  });
  search.setAttribute("list", "metric-names");
  page.replaceChildren(
    el(
      "section",
      { class: "toolbar" },
      el("h1", null, "Runs"),
      el("span", { class: "grow" }),
      el("label", null, "smooth ", smoothing),
      search,
      metrics,
    ),
    exported ? el("p", { class: "note" }, exported.left_out) : "",
    list,
    cards,
  );
  let names = query.metrics ? query.metrics.split(",") : [];
  let runs;
  let values = {};
  let drawn = "";

  function add(name) {
    if (!runs.sources.some((run) => run.metrics.includes(name)) || names.includes(name)) return;
    names = [name, ...names];
    history.replaceState(null, "", `#/runs?metrics=${names.map(encodeURIComponent).join(",")}`);
    search.value = "";
    update();
  }

  function remove(name) {
    names = names.filter((each) => each !== name);
    history.replaceState(
      null,
      "",
      names.length ? `#/runs?metrics=${names.map(encodeURIComponent).join(",")}` : "#/runs",
    );
    draw();
  }

  function draw() {
    state.smooth = Number(smoothing.value);
    const shown = runs.sources.filter((run) => run.metrics.length && !hidden.has(run.id));
    const several = shown.length > 1;
    const all = [...names.map((name) => [name, [name], true]), ...CHARTS];
    cards.replaceChildren(
      ...all
        .map(([title, group, own]) => {
          const series = shown.flatMap((run) =>
            group.flatMap((name, index) => {
              const points = values[run.id]?.[name];
              if (!points) return [];
              const color = several ? `c${(run.id - 1) % 8}` : `c${index}`;
              return [{ metric: name, run: run.name, points, color, dash: several ? `d${index}` : "d0" }];
            }),
          );
          if (!series.length) return "";
          const close = own
            ? el("button", { class: "ghost", title: "Remove this chart", onclick: () => remove(title) }, "×")
            : "";
          return el(
            "section",
            { class: "card" },
            el("h2", null, title, el("span", { class: "grow" }), close),
            chart(series, state.smooth),
          );
        })
        .filter(Boolean),
    );
    list.replaceChildren(
      ...runs.problems.map((problem) => el("p", { class: "alarm" }, problem)),
      ...runs.sources.map((run) => runCard(run, hidden, several, draw)),
    );
  }

  async function update() {
    runs = await get("runs");
    metrics.replaceChildren(
      ...[...new Set(runs.sources.flatMap((run) => run.metrics))].map((name) => el("option", { value: name })),
    );
    values = await get("curves", { names: [...names, ...CHARTS.flatMap(([, group]) => group)].join("\n") });
    const text = JSON.stringify([names, runs, values]);
    if (text === drawn) return; // nothing that a person has opened or points at is drawn again
    drawn = text;
    draw();
  }

  await update();
  return update;
}

function runCard(run, hidden, several, draw) {
  const last = run.last;
  const figures = [
    [run.step === 1 ? "step" : "steps", run.step],
    ["reward", last["reward/mean"]],
    ["held out", last["eval/reward"]],
    ["greedy", last["eval/greedy"]],
    ["chains", run.chains],
  ].filter(([, value]) => value !== undefined && value !== null);
  const toggle = () => {
    if (!hidden.delete(run.id)) hidden.add(run.id);
    draw();
  };
  const swatch = run.metrics.length
    ? el("input", { type: "checkbox", checked: !hidden.has(run.id), title: "Draw its curves", onchange: toggle })
    : "";
  const card = el(
    "section",
    { class: "card run" },
    el(
      "h2",
      null,
      swatch,
      several ? el("i", { class: `swatch c${(run.id - 1) % 8}` }) : "",
      link(`#/chains?source=${run.id}`, run.name),
      run.live ? el("span", { class: "badge live" }, "running") : "",
      el("span", { class: "badge" }, run.kind),
    ),
    el("p", { class: "faint path", title: run.path }, run.path),
    el(
      "p",
      { class: "figures" },
      figures.map(([name, value]) => el("span", null, el("b", null, number(value)), ` ${name}`)),
    ),
  );
  for (const [step, kind, message, chains] of run.alarms) append(card, [alarm(run, step, kind, message, chains)]);
  append(card, [
    el("details", null, el("summary", null, "Settings"), el("pre", null, JSON.stringify(run.settings, null, 1))),
  ]);
  return card;
}

function alarm(run, step, kind, message, chains) {
  const groups = [...new Set(chains.map((each) => each.split("/")[0]))].slice(0, 6);
  const links = groups.map((group) => [
    " ",
    link(`#/chains?source=${run.id}&step=${step}&group=${group}&held_out=0`, `group ${group}`),
  ]);
  return el("p", { class: "alarm" }, el("b", null, `step ${step} ${kind}`), ` ${message}`, links);
}
