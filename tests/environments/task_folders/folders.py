"""Writes small task folders."""

from pathlib import Path

WRITE_REWARD = "#!/bin/bash\n[ -f done ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt\n"
"""A verifier that looks for a file in the working folder."""


def write_task(
    root: Path,
    name: str = "make-done",
    *,
    config: str = "",
    tests: str | None = WRITE_REWARD,
    solution: str | None = "#!/bin/bash\ntouch done\n",
    files: dict[str, str] | None = None,
) -> Path:
    """Write a task folder whose task is to make the file `done`; returns it."""
    folder = root / name
    contents = {"instruction.md": "Make the file `done`.\n", "task.toml": config}
    contents |= {"tests/test.sh": tests} if tests is not None else {}
    contents |= {"solution/solve.sh": solution} if solution is not None else {}
    for path, text in {**contents, **(files or {})}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder
