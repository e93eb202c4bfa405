"""Trusted programs at and behind the wall: standard library only, Python 3.9 or later, never imported by the host. They
are run by path, or from what `boot` was sent.

    launch       outside, drops to a uid of its own, builds the outer room, starts the zygote in it
    zygote       in the outer room, preloads libraries, clones one keeper for each session, never runs user code
    boot         in a container, takes the others from stdin
    contained    in a container, becomes the keeper
    keeper       first process of a session: owns the socket to the host, runs files and shell, watches the interpreter
    interpreter  the only process that runs what a model wrote
"""
