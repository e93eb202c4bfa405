"""What runs in the sandbox when a solution meets its tests: standard library only, Python 3.9 or later.

    tests process                       solution process
    trusted.py  Handle, exceptions ──── solution.py  the operations on the solution's objects
                peer.py  questions and answers, one at a time
                plain.py values as JSON and back
    swallowed.py  checks that the solution keeps from counting

The tests process is the session's interpreter. It forks the solution process before it is given the first test, so the
tests are never in the solution's memory; and it lets nobody look into its own. The verdict leaves by the interpreter's
channel, of which the solution process has no copy.
"""
