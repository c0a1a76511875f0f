"""The exercises, by name and in order; a file of definitions per lesson."""

from . import (
    lesson00,
    lesson01,
    lesson02,
    lesson03,
    lesson04,
    lesson05,
    lesson06,
    lesson07,
    lesson08,
    lesson09,
    lesson10,
    lesson11,
    lesson12,
)

_LESSONS = (
    lesson00, lesson01, lesson02, lesson03, lesson04, lesson05, lesson06, lesson07, lesson08, lesson09, lesson10,
    lesson11, lesson12,
)  # fmt: skip
EXERCISES = {exercise.name: exercise for lesson in _LESSONS for exercise in lesson.EXERCISES}
