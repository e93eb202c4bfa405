"""The benchmarks' entry point in a fresh clone; nothing is measured here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import agent_step, run


@pytest.fixture
def started_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the benchmarks that are started, in a clone that has fetched nothing."""
    names: list[str] = []
    monkeypatch.setattr(run, "ROOT", tmp_path)
    monkeypatch.setattr(run, "run", lambda name, *, quick: not names.append(name))
    (tmp_path / "tests" / "tokenizers").mkdir(parents=True)
    return names


def write_fetch(folder: Path, body: str) -> None:
    (folder / "tests" / "tokenizers" / "fetch.py").write_text(body)


def test_benchmarks_without_their_tokenizer_are_skipped(
    started_names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fetch(tmp_path, "")  # as without npm: it names what is missing, and succeeds
    monkeypatch.setattr(sys, "argv", ["run.py", "memory", "leases"])
    assert run.main() == 0
    assert started_names == ["leases"]
    assert "skipped memory: no .cache/tokenizers/qwen2_5" in capsys.readouterr().out


def test_tokenizer_is_fetched_for_the_benchmarks_that_need_it(
    started_names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = "import pathlib, sys\nf = pathlib.Path(sys.argv[0]).parents[2] / '.cache/tokenizers' / sys.argv[1]\n"
    write_fetch(tmp_path, f"{fetch}f.mkdir(parents=True)\n(f / 'tokenizer.json').touch()\n")
    monkeypatch.setattr(sys, "argv", ["run.py", "leases"])
    assert run.main() == 0
    assert not (tmp_path / ".cache").exists()
    monkeypatch.setattr(sys, "argv", ["run.py", "memory", "leases"])
    assert run.main() == 0
    assert started_names == ["leases", "memory", "leases"]


@pytest.mark.parametrize(("argument", "hint"), [("lokup", "Did you mean lookup?"), ("step=3", "close ones: steps")])
def test_unknown_recipe_and_field_get_the_close_ones(
    argument: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["agent_step", *(["lookup"] * ("=" in argument)), argument])
    with pytest.raises(SystemExit, match="2"):
        agent_step.main()
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((run.ROOT / "benchmarks" / "paper").glob("*.py")), ids=lambda path: path.stem)
def test_recipe_of_the_paper_is_complete(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from agentfly.cli.recipes import Recipe
    from agentfly.cli.train import plan_recipe

    def draw(split: str) -> list[dict[str, str]]:
        return [{"question": f"{split} {number}", "answer": "1"} for number in range(3)]

    for name in ("alfworld.official_tasks", "math.math_tasks", "search.hotpotqa_tasks", "webshop.official_tasks"):
        monkeypatch.setattr(f"agentfly.environments.{name}", draw)
    if path.stem == "scienceworld":
        pytest.importorskip(
            "scienceworld", reason="its tasks are in a package: pip install 'agentfly-rl[scienceworld]'"
        )
        from agentfly.environments import ScienceWorld

        draw_tasks = ScienceWorld.draw_tasks  # 3,000 tasks take half a minute
        monkeypatch.setattr(ScienceWorld, "draw_tasks", lambda split, count: draw_tasks(split, 3))
    plan = plan_recipe(Recipe(path), {})
    assert plan.tasks
    assert plan.eval_tasks
    assert plan.make_agent(template="chatml", backend="scripted", backend_config={"script": "-"}).scorer is not None
