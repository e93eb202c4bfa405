"""MCP servers that misbehave, without any package: `python hostile_server.py KIND`."""

import json
import os
import signal
import subprocess
import sys
import time

KIND = sys.argv[1]
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
if KIND == "malformed_schema":
    SCHEMA = {"type": "object", "properties": {"text": {"type": "no such type"}}}


def send(message: dict) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def answer(request: dict, result: dict) -> None:
    send({"jsonrpc": "2.0", "id": request["id"], "result": result})


def call(request: dict) -> None:
    content = [{"type": "text", "text": "ok"}]
    if KIND == "flood":
        while True:
            sys.stdout.write("x" * 1000 + "\n")
    elif KIND == "flood_notifications":
        while True:
            send({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 1000}})
    elif KIND == "endless_line":
        while True:
            sys.stdout.write("x" * 65536)
    elif KIND == "never_answers":
        return
    elif KIND == "large":
        content = [{"type": "text", "text": "x" * 50_000_000}]
    elif KIND == "large_id_last":  # as the TypeScript package writes it
        text = json.dumps({"content": [{"type": "text", "text": "x" * 50_000_000}]})
        sys.stdout.write(f'{{"result":{text},"jsonrpc":"2.0","id":{request["id"]}}}\n')
        sys.stdout.flush()
        return
    elif KIND == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif KIND == "malformed_result":
        content = [{"type": "hologram", "text": 3}]
    elif KIND == "invalid_json":
        sys.stdout.write('{"jsonrpc": "2.0", "id": \n')
    elif KIND == "logs_to_stdout":
        sys.stdout.write("a log line\n")
    elif KIND == "server_error":
        error = {"code": -32603, "message": "the disk is full"}
        send({"jsonrpc": "2.0", "id": request["id"], "error": error})
        return
    elif KIND == "changes_tools":
        send({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})
    answer(request, {"content": content})


if KIND == "exits":
    sys.exit("no license found in /etc/license")
if KIND == "silent":
    sys.stderr.write("waiting for the moon\n")
    sys.stderr.flush()
    time.sleep(3600)
if KIND == "orphans":  # a child in a session of its own, and one that ignores what asks it to end
    subprocess.Popen(["sleep", "3600"], start_new_session=True)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

for line in sys.stdin:
    request = json.loads(line)
    method = request.get("method")
    if "id" not in request:
        continue
    if method == "initialize":
        version = "1999-01-01" if KIND == "old_protocol" else request["params"]["protocolVersion"]
        info = {"name": "hostile", "version": "1"}
        capabilities = {"tools": {"listChanged": True}}
        answer(request, {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info})
    elif method == "tools/list":
        name = "say"
        if KIND == "other_tools" and os.path.exists("../hostile_started_before"):
            name = "shout"
        description = "Say it. " * (100_000 if KIND == "long_description" else 1)
        answer(request, {"tools": [{"name": name, "description": description, "inputSchema": SCHEMA}]})
        if KIND == "other_tools":
            open("../hostile_started_before", "w").close()
    elif method == "tools/call":
        call(request)
    else:
        send({"jsonrpc": "2.0", "id": request["id"], "error": {"code": -32601, "message": "no such method"}})
if KIND == "orphans":
    time.sleep(3600)
