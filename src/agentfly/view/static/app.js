// Routes, keys, theme, and polling while runs go on.

import { exported } from "./api.js";
import { chainPage } from "./chain.js";
import { chainsPage } from "./chains.js";
import { comparePage } from "./compare.js";
import { el, elWith, link } from "./dom.js";
import { runsPage } from "./runs.js";

const POLL = 2000; // milliseconds
const KEYS = [
  ["r", "runs and curves"],
  ["t", "table of chains"],
  ["j / k", "next / previous chain"],
  ["Enter", "open the selected chain"],
  ["g", "the chain's group, side by side"],
  ["u", "back to the table"],
  ["c", "color tokens by author, mask, advantage, log-probability, ratio"],
  ["p", "unfold the prompt"],
  ["/", "search"],
  ["d", "dark or light"],
  ["?", "this list"],
];
const PAGES = { chains: chainsPage, chain: chainPage, compare: comparePage, runs: runsPage };
const page = document.getElementById("page");
const state = { keys: {} };
let refresh = null;

async function route() {
  const [path, parameters] = (location.hash.slice(2) || "runs").split("?");
  const [name, ids] = path.split("/");
  const query = Object.fromEntries(new URLSearchParams(parameters ?? ""));
  document.getElementById("tip").hidden = true;
  state.keys = {};
  refresh = null;
  for (const each of document.querySelectorAll("#bar a"))
    each.classList.toggle("set", each.hash === (name === "runs" ? "#/runs" : "#/chains"));
  const before = location.hash;
  try {
    const next = await (PAGES[name] ?? runsPage)(page, { ids: ids?.split(","), query, state });
    if (location.hash === before) refresh = next;
  } catch (error) {
    page.replaceChildren(el("p.alarm", error.message));
  }
  page.dataset.ready = before;
}

function theme(next) {
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = next ?? localStorage.getItem("theme") ?? preferred;
  if (next) localStorage.setItem("theme", next);
}

function flip() {
  theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
}

const help = document.getElementById("help");
const keys = KEYS.map(([key, what]) => el("tr", el("td", el("kbd", key)), el("td", what)));
help.append(el("h2", "Keys"), el("table", keys), elWith("button", { onclick: () => help.close() }, "close"));
document
  .getElementById("bar")
  .append(
    el("b", "AgentFly"),
    link("#/runs", "Runs"),
    link("#/chains", "Chains"),
    el("span.grow"),
    exported ? el("span.badge", "exported") : elWith("span.badge", { id: "connection" }, "connected"),
    elWith("button.ghost", { title: "Dark or light (d)", onclick: flip }, "◐"),
    elWith("button.ghost", { title: "Keys (?)", onclick: () => help.showModal() }, "?"),
  );
const shared = {
  r: () => (location.hash = "#/runs"),
  t: () => (location.hash = "#/chains"),
  d: flip,
  "?": () => help.showModal(),
};
addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || help.open) return;
  if (event.target.matches("input, select, textarea")) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const action = state.keys[event.key] ?? shared[event.key];
  if (!action) return;
  event.preventDefault();
  action();
});
addEventListener("hashchange", () => {
  page.scrollTop = 0; // <main> scrolls, not the window
  route();
});

async function poll() {
  const shown = document.getElementById("connection");
  try {
    if (refresh && !document.hidden) await refresh();
    shown.textContent = "connected";
    shown.className = "badge";
  } catch {
    shown.textContent = "the server has ended";
    shown.className = "badge lost";
  }
  setTimeout(poll, POLL);
}

theme();
await route();
if (!exported) setTimeout(poll, POLL);
