// Messages of a chain, with the calls of the model and what came of them.

import { el, plural, seconds } from "./dom.js";

const LONG = 4000; // characters after which a text is folded

// marked: per turn, the words of the model that differ from another chain.
export function conversation(chain, marked = null) {
  const root = el("div", { class: "conversation" });
  chain.segments.forEach((segment, index) => {
    if (chain.segments.length > 1) root.append(el("h3", null, `Segment ${index + 1} of ${chain.segments.length}`));
    const rewritten = segment.spans.filter((span) => span.author === "history");
    for (const span of segment.spans) {
      const nodes = span.messages.map((message) =>
        messageElement(chain, span, message, span.author === "model" ? marked?.[span.turn] : null),
      );
      if (rewritten.includes(span) && nodes.length)
        root.append(
          el("details", null, el("summary", null, `history as rewritten, ${plural(nodes.length, "message")}`), nodes),
        );
      else root.append(...nodes);
    }
  });
  if (!root.childElementCount) root.append(el("p", { class: "faint" }, "No messages were stored."));
  return root;
}

function messageElement(chain, span, message, marked) {
  const records = span.author === "model" ? (chain.turn_records[span.turn]?.[1] ?? []) : [];
  const time = span.author === "model" ? chain.turn_records[span.turn]?.[2] : null;
  const who = message.role === "tool" ? `tool ${message.name}` : message.role;
  const head = el(
    "header",
    null,
    el("b", null, who),
    el(
      "span",
      { class: "faint" },
      span.author === "model"
        ? ` turn ${span.turn + 1}, ${plural(span.ids.length, "token")}${time ? `, ${seconds(time)}` : ""}`
        : "",
    ),
  );
  const thinking = message.thinking
    ? el(
        "details",
        { class: "thinking", open: message.thinking.length < 600 },
        el("summary", null, "thinking"),
        el("div", { class: "text" }, message.thinking),
      )
    : "";
  const parts = message.parts.map((part) =>
    typeof part === "string"
      ? textElement(part, marked)
      : el("img", { src: part.image, alt: "image of the message", loading: "lazy" }),
  );
  const calls = message.calls.map(([name, written, problem, raw], index) =>
    callElement(name, written, problem || "", { raw, record: records[index], marked }),
  );
  const node = el("article", { class: `message a-${span.author}`, dir: "auto" }, head, thinking, parts, calls);
  return message.role === "system"
    ? el("details", { class: "system" }, el("summary", null, "system prompt"), node)
    : node;
}

function textElement(text, marked) {
  if (text === "") return "";
  if (marked) return el("div", { class: "text" }, markWords(text, marked));
  if (text.length <= LONG) return el("div", { class: "text" }, text);
  return el(
    "div",
    { class: "text" },
    text.slice(0, LONG),
    el("details", null, el("summary", null, `… ${plural(text.length - LONG, "more character")}`), text.slice(LONG)),
  );
}

function markWords(text, marked) {
  return marked ? text.split(/(\s+)/).map((word) => (marked.has(word) ? el("mark", null, word) : word)) : text;
}

function callElement(name, written, problem, { raw, record, marked }) {
  const [, status, time, , retries] = record ?? [];
  const outcome = record
    ? el("span", { class: status === "ok" ? "faint" : "bad" }, [
        ` ${status}`,
        time ? `, ${seconds(time)}` : "",
        retries ? `, after ${plural(retries, "failed attempt")}` : "",
      ])
    : "";
  const readable = el("pre", null, markWords(problem && raw ? raw : pretty(written), marked));
  return el(
    "div",
    { class: `call${status && status !== "ok" ? " failed" : ""}` },
    el("header", null, el("b", null, `→ ${name || "(no name)"}`), outcome),
    problem ? el("p", { class: "bad" }, problem) : "",
    readable,
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
      ...m.calls.map((call) => `${call[0]} ${call[2] && call[3] ? call[3] : pretty(call[1])}`),
    ]);
    turns[span.turn] = `${turns[span.turn] ?? ""} ${texts.join(" ")}`;
  }
  return turns;
}
