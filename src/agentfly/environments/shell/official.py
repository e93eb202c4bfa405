"""The questions of InterCode-Bash (of NL2Bash), in the folder `bash` of AGENTFLY_DATA.

A question is about one of four file systems, which a script of InterCode's makes. Both are needed: `nl2bash_fs_1.json`
and `setup_nl2b_fs_1.sh`, up to 4. There they stand at the root of a container; here, in the session's own folder, so
`/testbed/dir1` becomes `testbed/dir1` in scripts, questions and commands alike.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from agentfly.environments.data import Source, read_rows, validate_split
from agentfly.errors import DataError

NL2BASH = Source(
    "InterCode-Bash", "https://github.com/princeton-nlp/intercode (data/nl2bash and docker/bash_scripts)", "bash"
)
SYSTEMS = (1, 2, 3, 4)
_ROOT = re.compile(r"(?<![\w./-])/(testbed|system|workspace|backup)\b")


def nl2bash_tasks(split: str, *, systems: Sequence[int] = SYSTEMS) -> list[dict[str, Any]]:
    """The questions about these file systems: rows with `id`, `question`, `gold`, `kind` and `setup`."""
    if validate_split(split) != "test":
        raise DataError(f"InterCode-Bash has questions for test only, none for {split}; Shell.draw_tasks draws some")
    if not systems or any(number not in SYSTEMS for number in systems):
        raise DataError(f"there are the file systems 1 to 4, not {systems!r:.80}")
    return [row for number in systems for row in _asked(number)]


def _asked(number: int) -> list[dict[str, Any]]:
    questions = NL2BASH.file(f"nl2bash_fs_{number}.json")
    setup = NL2BASH.file(f"setup_nl2b_fs_{number}.sh").read_text(encoding="utf-8")
    rows: list[dict[str, Any]] = []
    for place, row in read_rows(questions):
        question, gold = row.get("query"), row.get("gold")
        if not isinstance(question, str) or not isinstance(gold, str):
            raise DataError(f"{place}: a row has the texts query and gold, not {row!r:.80}")
        texts = {"question": question, "gold": gold, "setup": setup}
        relative = {name: _ROOT.sub(r"\1", text) for name, text in texts.items()}
        rows.append({"id": f"nl2bash/{number}/{len(rows)}", **relative, "kind": f"file system {number}"})
    return rows
