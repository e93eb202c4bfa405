"""Further recipes of the rooms."""
