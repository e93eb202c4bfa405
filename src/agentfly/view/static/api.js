// Answers of the server, or of the data that an exported page embeds.

const embedded = document.getElementById("data");
export const exported = embedded ? JSON.parse(embedded.textContent) : null;

export async function get(name, query = {}) {
  if (exported) return answer(name, query);
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const response = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  const value = await response.json();
  if (value.error) throw new Error(value.error);
  return value;
}

function answer(name, query) {
  if (name === "runs") return exported.runs;
  if (name === "curves") return exported.curves;
  if (name === "chains") return select(query);
  const chain = exported.chains[query.id];
  if (!chain) throw new Error(`Chain ${query.id} is not part of this page. ${exported.left_out}`);
  return chain;
}

// The selection of `ChainIndex.select`, for the rows of an exported page. Which filters there are, and how each compares,
// is the table FILTERS of index.py; a test compares both selections.
function select({ sort = "order", descending, offset = 0, limit = 100, ...filters }) {
  const given = Object.entries(filters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const rows = exported.rows.filter((row) =>
    given.every(([name, value]) => {
      const [column, comparison] = exported.filters[name];
      return COMPARISONS[comparison](row[column], value, row);
    }),
  );
  if (sort !== "order") {
    const missing = (row) => (row[sort] === null ? 1 : 0);
    const compare = (a, b) => (descending ? b[sort] - a[sort] : a[sort] - b[sort]);
    rows.sort((a, b) => missing(a) - missing(b) || compare(a, b) || a.id - b.id);
  } else if (descending) rows.reverse();
  return { total: rows.length, rows: rows.slice(offset, offset + limit) };
}

const COMPARISONS = {
  integer: (own, value) => own !== null && Number(own) === Number(value),
  text: (own, value) => own === value,
  at_least: (own, value) => own !== null && own >= Number(value),
  at_most: (own, value) => own !== null && own <= Number(value),
  has: (own, value) => (value === "*" ? own !== "" : own.includes(`\n${value}\n`)),
  words: (_, value, row) => search(textOf(row), value),
};

// Words as SQLite's FTS5 splits them: lower-case letters and digits without diacritics; a space before and after each.
function split(text) {
  const plain = text.normalize("NFD").replace(/\p{M}/gu, "").toLowerCase();
  return ` ${(plain.match(/[\p{L}\p{N}\p{Co}]+/gu) ?? []).join(" ")} `;
}

// All words of a search, in any order; those in double quotes as a phrase, the last one as a prefix.
function search(text, query) {
  const phrases = query.split('"').flatMap((part, index) => (index % 2 ? [part] : part.split(/\s+/)));
  const wanted = phrases.map(split).filter((phrase) => phrase.trim());
  if (!query.trimEnd().endsWith('"') && wanted.length) wanted.push(wanted.pop().trimEnd());
  return wanted.every((phrase) => text.includes(phrase));
}

// The texts that index.py searches.
function textOf(row) {
  if (row.text === undefined) {
    const chain = exported.chains[row.id];
    const messages = chain.segments.flatMap((segment) => segment.spans).flatMap((span) => span.messages);
    const parts = messages.flatMap((m) => [...m.parts, m.thinking, ...m.calls.flatMap((call) => [call.name, call.arguments, call.problem])]);
    const failures = chain.failures.map((failure) => failure.message);
    const texts = [chain.prediction, row.task, ...parts, ...failures].filter((part) => typeof part === "string");
    Object.defineProperty(row, "text", { value: split(texts.join("\n")) });
  }
  return row.text;
}
