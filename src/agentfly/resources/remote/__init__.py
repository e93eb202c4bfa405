"""Instances that live elsewhere, used from here as if they were here.

    stand_in.py   on the host: an object of the environment's own type that has its methods carried out elsewhere
    shipping.py   on the host: how a class, and the arguments of a call, are made ready for the way out
    serving.py    where the instance lives: answers requests, whatever carries them
    plain.py      what may come back: plain data, never anything that runs when it is read
    line.py       requests and answers over a socket; worker.py the process at its other end

Requests go out pickled. Answers come back as plain data only: where an instance lives, hostile code may live too.
"""
