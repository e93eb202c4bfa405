"""Read a number in one image, open that room, read the digit there, and find a small digit by enlarging the image."""

from agentfly.environments.rooms.environment import FindDigit, Rooms

__all__ = ["FindDigit", "Rooms"]
