"""Trusted programs that build and run a sandbox. Standard library only, Python 3.9 or later. The host
starts them by path, or sends them to `bootstrap`. `agentfly.sandbox` imports none of them but `frames`.

    launch          on the host: switches to a user id of its own, mounts the zygote's root, starts the zygote in it
    zygote          preloads libraries, clones one session init per session, never runs user code
    bootstrap       in a container: receives the other programs on stdin
    session_init    first process of a session: owns the channel to the host, handles files and shell commands, watches
                    the interpreter
    interpreter     the only process that runs user code
    frames          the message format, on both ends of every channel
"""
