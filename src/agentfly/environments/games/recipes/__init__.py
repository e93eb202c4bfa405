"""Training recipes of the games."""
