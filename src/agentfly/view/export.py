"""A selection of chains as one static page: the viewer's own page with its data embedded, for a browser alone."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentfly.errors import DataError
from agentfly.runs.files import replace_non_finite, write_atomic
from agentfly.view.index import FILTERS
from agentfly.view.server import STATIC, ViewData

MAX_BYTES = 50_000_000
"""Maximum size of the page."""
_IMPORT = re.compile(r'^import [^;]* from "\./([a-z]+\.js)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def write_export(data: ViewData, path: Path, filters: Mapping[str, str], max_bytes: int = MAX_BYTES) -> str:
    """Write the chains that pass the filters, and the curves of all runs. Returns what was left out, as a sentence.

    Chains are taken in the order of the table until the page has `max_bytes`.
    """
    sources = data.index.sources.values()
    runs = data.runs({})
    names = sorted({name for source in runs["sources"] for name in source["metrics"]})
    fields_of_page = {
        "runs": _encode({**runs, "progress": 1, "sources": [{**source, "live": False} for source in runs["sources"]]}),
        "filters": _encode(FILTERS),
        "curves": _encode(data.curves({"names": "\n".join(names)})),
    }
    page = _render_page()
    size = len(page) + sum(map(len, fields_of_page.values())) + 1000
    total, rows = data.index.select(filters, limit=-1)
    chains: list[str] = []
    written = []
    damaged = 0
    for row in rows:
        try:
            chain = f'"{row["id"]}":{_encode(data.chain({"id": str(row["id"])}))}'
        except DataError:
            damaged += 1
            continue
        size += len(chain) + len(_encode(row)) + 2
        if size > max_bytes:
            break
        chains.append(chain)
        written.append(row)
    conditions = ", ".join(f"{name}={value}" for name, value in filters.items()) or "none"
    everything, _ = data.index.select({}, limit=0)
    left_out = (
        f"This page has {len(chains):,} of the {everything:,} chains of {len(sources)} "
        f"run{'' if len(sources) == 1 else 's'} (filters: {conditions})."
    )
    if damaged:
        left_out += f" Chains left out since their records are damaged: {damaged:,}."
    if len(chains) + damaged < total:
        left_out += (
            f" {total - len(chains) - damaged:,} chains that pass the filters are left out, "
            f"since the page would have more than {max_bytes / 1e6:g} MB."
        )
    fields_of_page["rows"] = _encode(written)
    fields_of_page["left_out"] = _encode(left_out)
    fields = ",".join(f'"{name}":{value}' for name, value in fields_of_page.items())
    text = page.replace("@DATA@", f'{{{fields},"chains":{{{",".join(chains)}}}}}')
    write_atomic(path, text.encode())
    return left_out


def _encode(value: Any) -> str:
    """JSON in ASCII without `<`: nothing in it can end the script element that holds it."""
    text = json.dumps(replace_non_finite(value), ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _render_page() -> str:
    """The page with style and scripts in it; its policy allows these, by their hashes, and no others."""
    style = (STATIC / "style.css").read_text("utf-8")
    script = _join_modules("app.js", set())
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:"
    page = (STATIC / "index.html").read_text("utf-8")
    data = '<script type="application/json" id="data">@DATA@</script>\n'
    meta = '<meta charset="utf-8">'
    replacements = {
        meta: f'{meta}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script type="module" src="app.js"></script>': f'{data}<script type="module">{script}</script>',
    }
    for old, new in replacements.items():
        assert old in page
        page = page.replace(old, new)
    return page


def _join_modules(name: str, done: set[str]) -> str:
    """A module after those that it imports, as one script. Their top-level names differ, as the browser tests show."""
    if name in done:
        return ""
    done.add(name)
    text = (STATIC / name).read_text("utf-8")
    imported = "".join(_join_modules(module, done) for module in _IMPORT.findall(text))
    return imported + _EXPORT.sub("", _IMPORT.sub("", text))


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
