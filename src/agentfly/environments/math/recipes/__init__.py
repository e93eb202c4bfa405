"""Further training recipes of mathematics."""
