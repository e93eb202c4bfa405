"""`python -m agentfly`, and with several processes `torchrun -m -- agentfly`."""

from agentfly.cli import main

if __name__ == "__main__":
    main()
