"""The arguments of `run`, `eval` and `sft`. The modules of the same names beside this folder do the work."""
