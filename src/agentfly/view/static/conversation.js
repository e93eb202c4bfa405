// Messages of a chain, with the calls of the model and what came of them.

import { el, elWith, plural, seconds } from "./dom.js";

const LONG = 4000; // characters after which a text is folded

// marked: per turn, the words of the model that differ from another chain.
export function conversation(chain, marked = null) {
  const root = el("div.conversation");
  chain.segments.forEach((segment, index) => {
    if (chain.segments.length > 1) root.append(el("h3", `Segment ${index + 1} of ${chain.segments.length}`));
    for (const span of segment.spans) {
      const words = span.author === "model" ? marked?.[span.turn] : null;
      const nodes = span.messages.map((message) => messageElement(chain, span, message, words));
      const summary = `history as rewritten, ${plural(nodes.length, "message")}`;
      const rewritten = span.author === "history" && nodes.length;
      root.append(...(rewritten ? [el("details", el("summary", summary), nodes)] : nodes));
    }
  });
  if (!root.childElementCount) root.append(el("p.faint", "No messages were stored."));
  return root;
}

function messageElement(chain, span, message, marked) {
  const record = (span.author === "model" && chain.turn_records[span.turn]) || {};
  const { calls: records = [], generate_seconds: time } = record;
  const who = message.role === "tool" ? `tool ${message.name}` : message.role;
  const turn = ` turn ${span.turn + 1}, ${plural(span.ids.length, "token")}${time ? `, ${seconds(time)}` : ""}`;
  const head = el("header", el("b", who), el("span.faint", span.author === "model" ? turn : ""));
  const open = message.thinking.length < 600;
  const thinking = message.thinking
    ? elWith("details.thinking", { open }, el("summary", "thinking"), el("div.text", message.thinking))
    : "";
  const parts = message.parts.map((part) =>
    typeof part === "string"
      ? textElement(part, marked)
      : elWith("img", { src: part.image, alt: "image of the message", loading: "lazy" }),
  );
  const calls = message.calls.map((call, index) => callElement(call, records[index], marked));
  const node = elWith(`article.message.a-${span.author}`, { dir: "auto" }, head, thinking, parts, calls);
  return message.role === "system" ? el("details.system", el("summary", "system prompt"), node) : node;
}

function textElement(text, marked) {
  if (text === "") return "";
  if (marked) return el("div.text", markWords(text, marked));
  if (text.length <= LONG) return el("div.text", text);
  const more = el("summary", `… ${plural(text.length - LONG, "more character")}`);
  return el("div.text", text.slice(0, LONG), el("details", more, text.slice(LONG)));
}

function markWords(text, marked) {
  return marked ? text.split(/(\s+)/).map((word) => (marked.has(word) ? el("mark", word) : word)) : text;
}

function callElement({ name, arguments: written, problem, raw }, record, marked) {
  const { status, seconds: time, retries, repeated } = record ?? {};
  const after = (retries ? `, after ${plural(retries, "failed attempt")}` : "") + (repeated ? ", repeated" : "");
  const outcome = record
    ? el(status === "ok" ? "span.faint" : "span.bad", ` ${status}`, time ? `, ${seconds(time)}` : "", after)
    : "";
  return el(
    status && status !== "ok" ? "div.call.failed" : "div.call",
    el("header", el("b", `→ ${name || "(no name)"}`), outcome),
    problem ? el("p.bad", problem) : "",
    el("pre", markWords(problem && raw ? raw : pretty(written), marked)),
  );
}

function pretty(written) {
  try {
    const value = JSON.parse(written);
    const lines = Object.entries(value).map(
      ([name, each]) => `${name}: ${typeof each === "string" ? each : JSON.stringify(each)}`,
    );
    return lines.join("\n") || "(no arguments)";
  } catch {
    return written; // cut off since it was too long
  }
}

// The words of the model by turn, with those of calls.
export function wordsByTurn(chain) {
  const turns = [];
  for (const span of chain.segments.flatMap((segment) => segment.spans)) {
    if (span.author !== "model") continue;
    const texts = span.messages.flatMap((m) => [
      m.thinking,
      ...m.parts.filter((part) => typeof part === "string"),
      ...m.calls.map((call) => `${call.name} ${call.problem && call.raw ? call.raw : pretty(call.arguments)}`),
    ]);
    turns[span.turn] = `${turns[span.turn] ?? ""} ${texts.join(" ")}`;
  }
  return turns;
}
