"""One file for each framework that is compared: each a process of its own, in an environment of its own."""
