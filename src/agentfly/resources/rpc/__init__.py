"""RPC to environment instances that run in another process, container or node.

    proxy.py          host: an object of the environment's own class that forwards method calls
    serialization.py  host: pickles classes and call arguments for the other end
    server.py         remote: executes requests, over any transport
    codec.py          encoding of answers: plain data, never anything that runs code when it is decoded
    connection.py     framed requests and answers over a socket, both ends

Requests are pickled. Answers are plain data only, because hostile code may run next to the instance.
"""
