"""Images of chains, and the processors of vision models."""
