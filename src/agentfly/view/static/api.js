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

// The filters of index.py for the rows of an exported page.
function select({ sort = "order", descending, offset = 0, limit = 100, ...filters }) {
  const given = Object.entries(filters).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const words = (filters.text ?? "").toLowerCase().replaceAll('"', "").split(/\s+/).filter(Boolean);
  const rows = exported.rows.filter((row) =>
    given.every(([name, value]) => {
      if (name === "text") return words.every((word) => textOf(row).includes(word));
      if (name === "min_reward") return row.reward !== null && row.reward >= Number(value);
      if (name === "max_reward") return row.reward !== null && row.reward <= Number(value);
      if (name === "tool" || name === "failure") {
        const names = name === "tool" ? row.tools : row.failure;
        return value === "*" ? names !== "" : names.includes(`\n${value}\n`);
      }
      const own = row[name === "group" ? "grp" : name];
      return String(typeof own === "boolean" ? Number(own) : own) === String(value);
    }),
  );
  if (sort !== "order") {
    const missing = (row) => (row[sort] === null ? 1 : 0);
    rows.sort((a, b) => missing(a) - missing(b) || (descending ? b[sort] - a[sort] : a[sort] - b[sort]));
  } else if (descending) rows.reverse();
  return { total: rows.length, rows: rows.slice(offset, offset + limit) };
}

function textOf(row) {
  if (row.text === undefined) {
    const chain = exported.chains[row.id];
    const messages = chain ? chain.segments.flatMap((s) => s.spans).flatMap((span) => span.messages) : [];
    const parts = messages.flatMap((m) => [m.thinking, ...m.parts, ...m.calls.flat()]);
    Object.defineProperty(row, "text", {
      value: [row.task, row.preview, ...parts.filter((p) => typeof p === "string")].join("\n").toLowerCase(),
    });
  }
  return row.text;
}
