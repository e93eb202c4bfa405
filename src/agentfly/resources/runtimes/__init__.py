"""Runtimes: where environment instances run (worker processes, sandbox sessions, containers, Ray actors)."""
