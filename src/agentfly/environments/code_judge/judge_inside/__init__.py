"""Runs a solution against its tests inside the sandbox. Standard library only, Python 3.9 or later.

    tests process                       solution process
    trusted.py  handles, exceptions ─── peer.py  operations on the solution's objects
                peer.py  requests and replies, one at a time
                plain.py values as JSON and back
    checks.py   checks that the solution keeps from counting

The tests process is the session's interpreter. It forks the solution process before it receives the first test, so the
tests are never in the solution's memory, and it is protected from inspection by other processes. The verdict leaves by
the interpreter's channel, of which the solution process has no copy.
"""
