"""The pool of the exam, a file for each topic."""

from . import code, derive, hand, kind, numbers  # noqa: F401
from .pool import POOL, TOPICS, Part, Question

__all__ = ["POOL", "TOPICS", "Part", "Question"]
