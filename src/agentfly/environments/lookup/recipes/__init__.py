"""Further recipes of lookups."""
