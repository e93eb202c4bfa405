"""`python -m agentfly.cli`."""

from agentfly.cli.app import main

if __name__ == "__main__":
    main()
