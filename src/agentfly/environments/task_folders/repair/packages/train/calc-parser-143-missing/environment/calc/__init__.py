"""Arithmetic in a line of text."""

from calc.parser import CalcError, evaluate, tokens, variables

__all__ = ["CalcError", "evaluate", "tokens", "variables"]
