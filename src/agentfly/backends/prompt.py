"""What of a prompt is refused before it costs anybody anything."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from agentfly.errors import BackendFault

Tokens = npt.NDArray[np.int32]


def validate_prompt(prompt: Sequence[int], vocabulary: int, context: int) -> Tokens:
    """A prompt that the model has embeddings for, with room behind it: on a GPU a wrong index would end the process."""
    if not len(prompt):
        raise BackendFault("an empty prompt: there is nothing to go on from")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BackendFault(f"a prompt is a sequence of token ids, not of {type(prompt[0]).__name__}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        wrong = next(each for each in prompt if not 0 <= each < vocabulary)
        raise BackendFault(
            f"the prompt has the token {wrong}, the model knows 0 to {vocabulary - 1}: "
            "is this the model's own tokenizer?"
        )
    if len(ids) >= context:
        raise BackendFault(f"the prompt has {len(ids)} tokens, the context {context}: no room left")
    return ids.astype(np.int32)
