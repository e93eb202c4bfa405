"""Runs in a process of its own, as a script: reads answers, one JSON on each line, and says whether they are right.

An answer may ask for 9**9**9, and no Python code gets a word in before that is worked out. So each judgement has its
seconds of processor time, after which the system ends the process, and the memory of the process is limited.
"""

import json
import logging
import os
import re
import resource
import signal
import sys
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

_TARGETS = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
_MARKED = re.compile(r"\\boxed|(?<!\\)\$")
"""Where an answer in a text is marked as a formula."""
_BARE = re.compile(
    r"(?:\\text\{[^{}$]*\}|\\(?!text\b)[a-zA-Z]+|\\[^a-zA-Z]|(?<![a-zA-Z])[a-zA-Z](?![a-zA-Z])|[^a-zA-Z$\n\\])+|[a-zA-Z]+"
)
"""A formula or a single word, and nothing else."""
_LONGEST = 200


def judged(given: str, right: str) -> dict[str, bool]:
    """Whether the given answer is the right one, and whether that can be read at all."""
    gold = _read(right if _MARKED.search(right) else rf"\boxed{{{right}}}")
    ours = _read(_whole(given)) if gold else []
    return {"readable": bool(gold), "right": bool(ours) and verify(gold, ours, timeout_seconds=None)}


def _whole(given: str) -> str:
    """What is boxed last; or the text, marked as one formula where it is nothing else: of `6 - 5i`, 5 would be read."""
    if (boxed := given.rfind(r"\boxed")) >= 0:
        return given[boxed:]
    text = given.strip().removesuffix(".")
    is_bare = len(text) <= _LONGEST and not _MARKED.search(text) and _BARE.fullmatch(text)
    return rf"\boxed{{{text}}}" if is_bare else given


def _read(text: str) -> list[Any]:
    found: list[Any] = parse(text, _TARGETS, parsing_timeout=None)
    return found


def main(seconds: float, memory: int) -> None:
    """Answer until nobody asks any more."""
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    with os.fdopen(os.dup(1), "w") as replies, open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # whatever a library prints is no reply
        judged("1", "1")  # what is loaded at the first use is no answer's fault
        print("ready", file=replies, flush=True)
        for line in sys.stdin:
            signal.setitimer(signal.ITIMER_PROF, seconds)  # unhandled, its signal ends the process
            try:
                said = judged(**json.loads(line))
            except MemoryError:
                return  # what is left of the memory is no help to the next answer
            except Exception:  # of a parser that was not made for such a text
                said = {"readable": True, "right": False}
            signal.setitimer(signal.ITIMER_PROF, 0)
            print(json.dumps(said), file=replies, flush=True)


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
