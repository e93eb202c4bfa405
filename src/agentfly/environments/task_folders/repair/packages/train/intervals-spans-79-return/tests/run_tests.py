"""Run the functions of hidden_tests.py, each in a process of its own, and write the reward: 1 if all pass, else 0.

The package under test shares the process with a test. A process counts as passed only if it prints a secret that it
read before the package was imported, so that ending the process early earns nothing.
"""

import ast
import json
import secrets
import subprocess
import sys
from pathlib import Path

TEST = """
import sys
secret = sys.stdin.read()
sys.path[:0] = ["/app", "/tests"]
import hidden_tests
getattr(hidden_tests, sys.argv[1])()
sys.__stdout__.write(secret)
"""


def passes(name):
    secret = secrets.token_hex(16)
    command = [sys.executable, "-I", "-B", "-c", TEST, name]
    try:
        process = subprocess.run(command, input=secret, stdout=subprocess.PIPE, text=True, errors="replace", timeout=5)
    except subprocess.TimeoutExpired:
        return False
    return process.returncode == 0 and process.stdout.endswith(secret)


syntax_tree = ast.parse(Path("/tests/hidden_tests.py").read_text())
names = [node.name for node in syntax_tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
passed = sum(map(passes, names))
rewards = {"reward": float(passed == len(names)), "passed": passed / len(names)}
Path("/logs/verifier/reward.json").write_text(json.dumps(rewards))
