"""Every block of Python in the README and the docs runs as it stands."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of one page share a namespace, as a reader who types them in one after another would have."""
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    for block in BLOCK.finditer(text):
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    broken = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert not broken


def test_readme_is_short() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 90
    assert not [line for line in lines if len(line) > 120]


@pytest.mark.integration
def test_the_file_of_the_readme_trains(tmp_path: Path, small_model: Path) -> None:
    from tests.commands import run_command  # imports torch, which the quick tests do without

    recipe = tmp_path / "facts.py"
    recipe.write_text(BLOCK.findall((ROOT / "README.md").read_text())[0])
    fields = ["steps=1", "tasks_per_step=2", "num_chains=2", "evaluation.every=none"]
    run = run_command("train", recipe, "--run", tmp_path / "run", f"model={small_model}", *fields)
    assert run.returncode == 0, run.stderr
    assert (tmp_path / "run" / "report.html").is_file()


def test_semicolons_are_rare_in_prose() -> None:
    """Two short sentences are easier to read than one with a semicolon: about 1 in 1,000 words."""
    words = semicolons = 0
    for page in PAGES:
        blocks = re.sub(r"^```.*?^```|^\|.*?$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        prose = re.sub(r"`[^`]*`|\]\([^)]*\)", " ", blocks)
        words += len(prose.split())
        semicolons += prose.count(";")
    assert words > 40_000
    assert 1000 * semicolons < 1.5 * words


VARIABLE = re.compile(
    r"""\benviron(?:\.get|\.setdefault)?[(\[]\s*"([A-Z][A-Z_]+)"|"(AGENTFLY_[A-Z_]+|[A-Z]+_API_(?:KEY|URL))\""""
)


def test_every_environment_variable_is_documented() -> None:
    page = (ROOT / "docs" / "environment-variables.md").read_text()
    sources = (ROOT / "src" / "agentfly").rglob("*.py")
    # Programs inside a sandbox session see the session's variables, none of the user's.
    texts = [path.read_text() for path in sources if "inside" not in path.parts]
    read = {name for text in texts for match in VARIABLE.findall(text) for name in match if name}
    assert {"AGENTFLY_CACHE", "AGENTFLY_DATA", "OPENAI_API_KEY", "SERPER_API_KEY"} <= read
    assert not {name for name in read if f"`{name}`" not in page}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tables_and_lists_follow_an_empty_line(page: Path) -> None:
    """Without it, Markdown shows their rows and items as one paragraph."""
    joined, in_code, previous = [], False, ""
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        if is_fence := line.lstrip().startswith("```"):
            in_code = not in_code
        kind = "row" if line.startswith("|") else "item" if re.match(r"- |\d+\. ", line) else "text"
        if in_code or is_fence:
            kind = "code"
        elif line[:1] in ("", " ", "#"):
            kind = "other"
        if (kind, previous) in (("row", "text"), ("row", "code"), ("item", "text")):
            joined.append(f"{number}: {line}")
        previous = kind
    assert not joined
