"""The backends by name: their settings are checked before anything is opened."""

from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from agentfly.backends import find_backend


@pytest.mark.parametrize("name", ["client", "scripted", pytest.param("transformers", marks=pytest.mark.integration)])
def test_every_number_among_the_settings_has_declared_bounds(name: str) -> None:
    for setting, hint in get_type_hints(find_backend(name).__init__, include_extras=True).items():
        options = {hint} if get_origin(hint) is Annotated else {hint, *get_args(hint)}
        assert not options & {int, float}, setting
