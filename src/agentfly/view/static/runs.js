// The runs, and curves of their metrics; several runs are drawn into one chart.

import { exported, get } from "./api.js";
import { chart } from "./chart.js";
import { el, elWith, link, number, options } from "./dom.js";

// Charts of the first page: title, and metrics that belong together.
const CHARTS = [
  ["Reward", ["reward/mean", "eval/reward", "eval/greedy"]],
  ["Turns and calls per chain", ["chain/turns", "calls/chain"]],
  ["Calls that failed", ["calls/invalid_rate", "calls/unknown_rate", "calls/error_rate", "calls/timeout_rate"]],
  ["Entropy", ["policy/entropy"]],
  ["Staleness", ["policy/staleness", "policy/staleness_max"]],
  ["Sampler and learner", ["policy/mismatch_kl"]],
  ["Environments", ["environments/leased", "environments/waiting"]],
  ["Groups without variance", ["group/zero_variance"]],
];

export async function runsPage(page, { query, state }) {
  const hidden = (state.hidden ??= new Set());
  const cards = el("div.charts");
  const list = el("div.runs");
  const range = { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth ?? 0 };
  const smoothing = elWith("input", { ...range, oninput: () => draw() });
  const metrics = elWith("datalist", { id: "metric-names" });
  const search = elWith("input", {
    type: "search",
    placeholder: "add a metric: policy/grad_norm",
    list: "metric-names",
    "aria-label": "Metric",
    onchange: () => add(search.value),
  });
  page.replaceChildren(
    el("section.toolbar", el("h1", "Runs"), el("span.grow"), el("label", "smooth ", smoothing), search, metrics),
    exported ? el("p.note", exported.left_out) : "",
    list,
    cards,
  );
  let names = query.metrics ? query.metrics.split(",") : [];
  let runs;
  let values = {};
  let drawn = "";

  function show(next) {
    names = next;
    const chosen = names.length ? `?metrics=${names.map(encodeURIComponent).join(",")}` : "";
    history.replaceState(null, "", `#/runs${chosen}`);
  }

  function add(name) {
    if (!runs.sources.some((run) => run.metrics.includes(name)) || names.includes(name)) return;
    show([name, ...names]);
    search.value = "";
    update();
  }

  function remove(name) {
    show(names.filter((each) => each !== name));
    draw();
  }

  function draw() {
    state.smooth = Number(smoothing.value);
    const shown = runs.sources.filter((run) => run.metrics.length && !hidden.has(run.id));
    const several = shown.length > 1;
    const chartCard = ([title, group, own]) => {
      const series = shown.flatMap((run) =>
        group.flatMap((name, index) => {
          const points = values[run.id]?.[name];
          if (!points) return [];
          const color = several ? `c${(run.id - 1) % 8}` : `c${index}`;
          return [{ metric: name, run: run.name, points, color, dash: several ? `d${index}` : "d0" }];
        }),
      );
      if (!series.length) return [];
      const close = { title: "Remove this chart", onclick: () => remove(title) };
      const heading = el("h2", title, el("span.grow"), own ? elWith("button.ghost", close, "×") : "");
      return [el("section.card", heading, chart(series, state.smooth))];
    };
    cards.replaceChildren(...[...names.map((name) => [name, [name], true]), ...CHARTS].flatMap(chartCard));
    list.replaceChildren(
      ...runs.problems.map((problem) => el("p.alarm", problem)),
      ...runs.sources.map((run) => runCard(run, hidden, several, draw)),
    );
  }

  async function update() {
    runs = await get("runs");
    const all = new Set(runs.sources.flatMap((run) => run.metrics));
    metrics.replaceChildren(...options([...all].map((name) => [name, ""])));
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
  const box = { type: "checkbox", checked: !hidden.has(run.id), title: "Draw its curves", onchange: toggle };
  const heading = el(
    "h2",
    run.metrics.length ? elWith("input", box) : "",
    several ? el(`i.swatch.c${(run.id - 1) % 8}`) : "",
    link(`#/chains?source=${run.id}`, run.name),
    run.live ? el("span.badge.live", "running") : "",
    el("span.badge", run.kind),
  );
  return el(
    "section.card.run",
    heading,
    elWith("p.faint.path", { title: run.path }, run.path),
    el("p.figures", figures.map(([name, value]) => el("span", el("b", number(value)), ` ${name}`))),
    run.alarms.map((each) => alarm(run, each)),
    el("details", el("summary", "Settings"), el("pre", JSON.stringify(run.settings, null, 1))),
  );
}

function alarm(run, [step, kind, message, chains]) {
  const groups = [...new Set(chains.map((each) => each.split("/")[0]))].slice(0, 6);
  const links = groups.map((group) => [
    " ",
    link(`#/chains?source=${run.id}&step=${step}&group=${group}&held_out=0`, `group ${group}`),
  ]);
  return el(kind === "solved" ? "p" : "p.alarm", el("b", `step ${step} ${kind}`), ` ${message}`, links);
}
