"""The tile player: a recorded launch as frames, in the terminal or on a page."""

from .command import add_command

__all__ = ["add_command"]
