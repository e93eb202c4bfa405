"""GLM 4: no token ends a turn; the model stops by opening the turn of whom it expects next."""

from __future__ import annotations

from agentfly.templates.family import Family

FAMILIES = (
    Family(
        name="glm-4",
        needs=("<|user|>", "<|observation|>"),
        close=("<|user|>", "<|observation|>", "<|endoftext|>"),
        reader="glm",
        image="<|begin_of_image|><|image|><|end_of_image|>",
        aliases=("glm", "glm4", "glm-4.5"),
    ),
)
