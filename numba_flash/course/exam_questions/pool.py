"""The questions of the exam: functions of a random generator, whose numbers come from the library.

    @question("numbers", "02, part 4", minutes=5)
    def naive_bill(rng): ...                                  # -> {"text": ..., "parts": ..., "why": ...}

A part has one right answer and is graded by the program; what `open` lists is read by a person.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field

TOPICS = {
    "kind": "What kind of optimisation",
    "numbers": "Numbers",
    "hand": "By hand",
    "code": "Code reading",
    "derive": "Derive",
}


@dataclass(frozen=True)
class Part:
    """One answer to fill in: a number (a float is right within 1 %), a letter, "yes" or "no", "true" or "false"."""

    ask: str
    expected: int | float | str
    points: int = 1


@dataclass(frozen=True)
class Question:
    """A question and its key. also: what is asked beyond the parts. open: (points, what for), read by a person.

    wrong: (answer, what it reveals). facts: the sizes that were drawn, for whoever checks the key.
    """

    name: str
    topic: str
    lesson: str
    minutes: int
    text: str
    why: str
    parts: tuple = ()
    also: str = ""
    open: tuple = ()
    wrong: tuple = ()
    choices: tuple = ()
    facts: dict = field(default_factory=dict)

    @property
    def points(self):
        return sum(part.points for part in self.parts) + sum(points for points, _ in self.open)


POOL: dict[str, Callable] = {}


def question(topic, lesson, minutes, name=None):
    """Put the function below into the pool: rng -> the other fields of a Question."""

    def register(make):
        key = name or make.__name__

        def build(rng):
            return Question(key, topic, lesson, minutes, **make(rng))

        build.topic, build.minutes = topic, minutes
        build.last = max(map(int, re.findall(r"\b(\d\d), part", lesson)))  # the last lesson that it takes
        POOL[key] = build
        return make

    return register


def lettered(rng, right, wrong):
    """The right choice among the wrong ones, in random order -> choices and the letter of the right one."""
    choices = [right, *wrong]
    rng.shuffle(choices)
    return tuple(zip("ABCDEFGH", choices, strict=False)), "ABCDEFGH"[choices.index(right)]


def power(exponent):
    """A score whose exponential is a power of two."""
    return "0" if not exponent else f"{exponent}·ln 2" if exponent != 1 else "ln 2"


def number(x):
    """A Fraction as an int where it is one, else as a float."""
    return int(x) if x == int(x) else float(x)
