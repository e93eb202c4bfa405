"""What the commands do. `cli.py` reads the words; each module here does the work of one command, or is shared."""
