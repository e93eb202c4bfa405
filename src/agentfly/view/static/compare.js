// Chains beside each other: those of a group, or one task before and after training.

import { get } from "./api.js";
import { chainName, rewardCell, stepName } from "./chains.js";
import { conversation, wordsByTurn } from "./conversation.js";
import { el, link, plural } from "./dom.js";

export async function comparePage(page, { ids, query, state }) {
  const chains = [];
  for (const id of ids) chains.push(await get("chain", { id }));
  const differ = query.diff === "1" && chains.length === 2;
  const first = chains[0];
  const several = chains.some((chain) => chain.source !== first.source);
  const marks = differ ? [differences(chains[0], chains[1]), differences(chains[1], chains[0])] : [];
  const rewards = chains.map((chain) => chain.reward).filter((reward) => reward !== null);
  const mean = rewards.reduce((sum, each) => sum + each, 0) / (rewards.length || 1);
  const title = differ
    ? `Task ${first.task}: ${chains.map((chain) => placeName(chain, several)).join(" and ")}`
    : `Group ${first.grp}${first.step === null ? "" : ` of ${first.held_out ? "" : "step "}${stepName(first)}`}`;
  const note = differ
    ? "words of the model that the other chain does not have are marked"
    : `${chains.length} chains, mean reward ${mean.toFixed(3)}`;
  const cards = chains.map((chain, index) => {
    const name = `${differ ? `${placeName(chain, several)}: ` : ""}${chainName(chain)}`;
    const ended = `${chain.stop} after ${plural(chain.turns, "turn")}, ${plural(chain.sampled, "token")} sampled`;
    const heading = [link(`#/chain/${chain.id}`, name), rewardCell(chain.reward), el("span.grow"), advantageOf(chain)];
    return el(
      "section.card",
      el("h2", heading),
      el("p.faint.small", ended),
      chain.failures.map(({ kind, message }) => el("p.alarm", el("b", kind), ` ${message}`)),
      conversation(chain, differ ? marks[index] : null),
    );
  });
  page.replaceChildren(
    el("section.toolbar", el("h1", title), el("span.faint", note)),
    el("section.beside", cards),
  );
  state.keys = { u: () => history.back() };
  return null;
}

// The step of a chain; with its run where chains of several runs are shown.
function placeName(chain, several) {
  if (!several) return stepName(chain);
  return chain.step === null ? chain.source_name : `${chain.source_name} ${stepName(chain)}`;
}

function advantageOf(chain) {
  const values = chain.segments.flatMap((segment) => segment.spans).flatMap((span) => span.advantages ?? []);
  if (!values.length) return el("span.faint.small", chain.trained ? "" : "not trained");
  const mean = values.reduce((sum, each) => sum + each, 0) / values.length;
  return el("span.small", `advantage ${mean >= 0 ? "+" : ""}${mean.toFixed(2)}`);
}

// Per turn, the words of a chain that the other one does not have in that turn.
function differences(chain, other) {
  const theirs = wordsByTurn(other).map((text) => new Set((text ?? "").split(/\s+/)));
  return wordsByTurn(chain).map(
    (text, turn) => new Set((text ?? "").split(/\s+/).filter((word) => word && !theirs[turn]?.has(word))),
  );
}
