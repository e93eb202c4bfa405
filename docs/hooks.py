"""Hooks of the documentation site (mkdocs.yml): what is generated while the pages are read.

`::: exports MODULE` documents every name in the `__all__` of a module whose names are imported lazily, which the static
analysis of mkdocstrings does not see. `<!-- table of MODULE -->` is a table of these names. `<!-- command line -->` is
the reference of the `agentfly` command, `<!-- fields -->` that of the configuration. A link to a file of the repository
outside of `docs` leads to a page with the file's text, or with the cells of a notebook.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

_EXPORTS = re.compile(r"^::: exports ([\w.]+)$", re.MULTILINE)
_TABLE = re.compile(r"^<!-- table of ([\w.]+) -->$", re.MULTILINE)
_COMMANDS = "<!-- command line -->"
_FIELDS = "<!-- fields -->"
_LINK = re.compile(r"\]\(((?:\.\./)+[^)#:]+)((?:#[^)]*)?)\)")
_LANGUAGES = {".md": "markdown", ".py": "python", ".toml": "toml", ".yml": "yaml"}


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each linked file outside of `docs`."""
    for page in list(files.documentation_pages()):
        source = DOCS / page.src_uri
        for link, _ in _LINK.findall(source.read_text() if source.is_file() else ""):
            path = (source.parent / link).resolve()
            if _is_outside(path) and path.is_file() and files.get_file_from_path(_page_of(path)) is None:
                files.append(File.generated(config, _page_of(path), content=_format_file(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Expand the directives and the links that the module docstring lists."""
    source = DOCS / page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        path = (source.parent / match[1]).resolve()
        up = "../" * page.file.src_uri.count("/")
        return f"]({up}{_page_of(path)})" if _is_outside(path) else match[0]

    markdown = _LINK.sub(rewrite, markdown)
    markdown = _EXPORTS.sub(lambda match: _document_exports(match[1]), markdown)
    markdown = _TABLE.sub(lambda match: _tabulate_exports(match[1]), markdown)
    if _FIELDS in markdown:
        from agentfly.cli.fields import format_markdown

        markdown = markdown.replace(_FIELDS, format_markdown())
    return markdown.replace(_COMMANDS, _document_commands()) if _COMMANDS in markdown else markdown


def find_exports(module: str) -> dict[str, Any]:
    """The objects that a module exports, by name: those of `__dir__` where it has one, else those of `__all__`."""
    source = importlib.import_module(module)
    names = dir(source) if "__dir__" in vars(source) else source.__all__
    values = {name: getattr(source, name) for name in sorted(names, key=str.lower)}
    return {name: value for name, value in values.items() if value.__module__.startswith("agentfly.")}


def _is_outside(path: Path) -> bool:
    return path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)


def _page_of(path: Path) -> str:
    return f"files/{path.relative_to(ROOT).as_posix()}.md"


def _format_file(path: Path) -> str:
    """The text of a page that shows a file; a notebook is shown as its cells."""
    if path.suffix == ".ipynb":
        cells = [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(path.read_text())["cells"]]
        texts = [f"```python\n{text}\n```" if kind == "code" else text for kind, text in cells]
        up = "../" * (len(path.relative_to(ROOT).parts))
        return "\n\n".join(texts).replace("](../docs/", f"]({up}")
    language = _LANGUAGES.get(path.suffix, "text")
    return f"# {path.name}\n\n`````{language}\n{path.read_text()}\n`````\n"


def _document_exports(module: str) -> str:
    return "\n\n".join(f"::: {value.__module__}.{name}" for name, value in find_exports(module).items())


def _tabulate_exports(module: str) -> str:
    rows = ["| name | |", "|---|---|"]
    for name, value in find_exports(module).items():
        summary = (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| [`{name}`][{value.__module__}.{name}] | {summary} |")
    return "\n".join(rows)


def _document_commands() -> str:
    import typer
    from typer.cli import get_docs_for_click

    from agentfly.cli.app import app

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="agentfly")
    text = text.partition("\n")[2]  # without the heading: the page has one
    # Lists of commands have shortened descriptions; link to the full ones.
    sections = re.split(r"^(#+ `agentfly.*`)$", text, flags=re.MULTILINE)
    for at in range(0, len(sections), 2):
        parent = sections[at - 1].strip("# `") if at else "agentfly"
        link = rf"* [`{parent} \1`](#{parent.replace(' ', '-')}-\1)"
        head, commands, rest = sections[at].partition("**Commands**:")
        sections[at] = head + commands + re.sub(r"^\* `([\w-]+)`.*$", link, rest, flags=re.MULTILINE)
    return "".join(sections)
