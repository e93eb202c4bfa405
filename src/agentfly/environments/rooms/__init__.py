"""Read a number in one image, open that room, read the digit there; and tiles to click on by color."""

from agentfly.environments.rooms.environment import Rooms, Tiles

__all__ = ["Rooms", "Tiles"]
