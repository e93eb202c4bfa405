"""Further recipes of the web shop."""
