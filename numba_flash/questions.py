"""Questions for a number before a lesson shows it: what was typed, what it says of the student, what is kept of it.

`Lesson.ask` puts them. Their sizes are drawn from --seed, so that neighbours in a class get different numbers.
"""

import ast
import contextlib
import json
import math
import operator
import re
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

from .files import write_text

TRIES = 2
NEAR = Fraction(1, 100)  # how far off an answer may be, relatively, where a question says "about"
LEFT_BEHIND = 5  # seconds after which a lock is that of a lesson that was killed
LENGTH, BITS, POWER = 200, 4096, 64  # of what is typed; of a number; the largest exponent

_SIGNS = {
    "×": "*", "·": "*", "÷": "/", "−": "-", "–": "-", "^": "**", "²": "**2", "³": "**3", "⌈": "ceil(", "⌉": ")",
    "⌊": "floor(", "⌋": ")", "[": "(", "]": ")", "∞": "inf",
}  # fmt: skip
_FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "exp": math.exp, "log": math.log, "sqrt": math.sqrt}
_OPERATIONS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip


@dataclass
class Question:
    """A question for one number, about `sizes` (such as `Lesson.draw` gives); `names` are what an answer may use.

    answer: an int or a Fraction, exact, or with `about` any number. how: the sentence that derives it. hint: the way to
    think about it. wrong: pairs (number, the sentence that says why it is wrong), or a dictionary of them; one head of
    H, and bytes where the question is for elements, are known anyhow. `given` and the fields after it say what became
    of the question; `said` is what need not be said again.
    """

    name: str
    sizes: SimpleNamespace
    text: str
    answer: int | float | Fraction
    how: str
    hint: str
    wrong: list = ()
    about: bool = False
    asked: bool = False
    given: list = field(default_factory=list)
    correct: int | None = None
    time: str | None = None
    said: list = field(default_factory=list)

    def __post_init__(self):
        heads, elements = vars(self.sizes).get("H"), "how many elements" in self.text.lower()
        self.known = list(self.wrong.items() if isinstance(self.wrong, dict) else self.wrong)
        if heads:
            self.known.append((Fraction(self.answer) / heads, f"That is for one head. There are H = {heads}."))
        if elements:
            self.known.append((4 * self.answer, "Those are bytes. The question is for elements, of 4 bytes each."))
        self.wrong = {number: why for number, _ in self.known if (why := self._why(Fraction(number)))}

    def __str__(self):
        sizes = ", ".join(f"{name} = {value:,}{' heads' * (name == 'H')}" for name, value in vars(self.sizes).items())
        return f"For {sizes}: {' '.join(self.text.split())}"

    @property
    def names(self):
        """The sizes, and what follows from them: N of Tr tiles of Br × Br, and Tr = ⌈N/Br⌉ and Tc = ⌈N_k/Bc⌉."""
        names = dict(vars(self.sizes))
        if "Tr" in names and "Br" in names:
            names = {"N": names["Tr"] * names["Br"], "Bc": names["Br"], **names}
        keys = names.get("N_k", names.get("N"))
        for number_of, length, side in (("Tr", names.get("N"), "Br"), ("Tc", keys, "Bc")):
            if length and side in names:
                names.setdefault(number_of, -(-length // names[side]))
        return names

    @property
    def shown(self):
        """The answer as it is printed."""
        return f"{self.answer:,}" if isinstance(self.answer, int) else f"{float(self.answer):.4g}"

    def judge(self, text):
        """What to say to an answer as it was typed -> (whether it is right, a sentence). ValueError: it is no number.

        An answer that is a number is kept, with the time. A word of the question may follow it: 72,000 elements.
        """
        value = number(self._without_unit(text), self.names)
        self.given.append(text)
        self.time = datetime.now(UTC).isoformat(timespec="seconds")
        if self._is(value, self.answer):
            self.correct = len(self.given)
            return True, f"Right. {self.how}"
        why = self._why(value)
        if why:
            return False, self._new(why) or f"No, for the same reason. {self._new(self.hint)}".strip()
        near = "" if self.about or abs(value - self.answer) > NEAR * abs(self.answer) else " But near: count exactly."
        side, more = "large" if value > self.answer else "small", self._new(self.hint)
        times = value / Fraction(self.answer)
        if not more and not near and 0 < times < 1_000_000:
            return False, f"No, that is too {side}: {float(times):.3g} times the answer."
        return False, f"No, that is too {side}.{near} {more}".strip()

    def help(self):
        """The hint, as something that was said."""
        self.said.append(self.hint)
        return self.hint

    def _why(self, value):
        """What is known of a wrong number, also as that of one head; None where it may be one mistake or another, and
        where at these sizes a wrong way gives the right number.
        """
        heads = vars(self.sizes).get("H", 1)
        said = {
            why: more
            for times, more in ((heads, f" And there are H = {heads} heads."), (1, ""))
            for known, why in self.known
            if self._is(value * times, known)
        }
        if len(said) != 1 or self._is(value, self.answer):
            return None
        return "".join(*said.items())

    def _new(self, sentence):
        """The sentence, if it has not been said."""
        if sentence in self.said:
            return ""
        self.said.append(sentence)
        return sentence

    def _without_unit(self, text):
        """What was typed, without a last word of 4 letters or more that the question has, too."""
        words = {word.rstrip("s") for word in re.findall("[a-z]{4,}", self.text.lower())}
        unit = re.search(r"(?<=[\w)\]⌉])\s+([A-Za-z]{4,})\.?$", text)
        return text[: unit.start()] if unit and unit[1].lower().rstrip("s") in words else text

    def _is(self, value, expected):
        return abs(value - Fraction(expected)) <= (NEAR * abs(Fraction(expected)) if self.about else 0)

    def kept(self):
        """What --answers writes of it."""
        plain = {"right": self.answer if isinstance(self.answer, int) else float(self.answer), "about": self.about}
        plain |= {"wrong": {f"{float(value):.15g}": why for value, why in self.wrong.items()}}
        became = {name: getattr(self, name) for name in ("asked", "given", "correct", "time")}
        return {"name": self.name, "text": str(self), "sizes": vars(self.sizes), **plain, **became}


def number(text, names=None):
    """The value of what a student typed -> Fraction. ValueError with a sentence for the student where it has none.

    4,194,304 and 4_194_304 and 4.19e6; + - * / // ** and parentheses; ceil, floor, exp, log, sqrt; and the sizes
    `names` (name -> number), also as in 2Nd, and in lower case where that is no name of its own. Nothing else is
    evaluated.
    """
    known, names = names or {}, {name.lower(): value for name, value in (names or {}).items()} | (names or {})
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    try:
        if len(text) > LENGTH:
            raise SyntaxError
        return _value(ast.parse(" ".join(_tokens(text, names)), mode="eval").body, names)
    except NameError as error:
        listed = ", ".join([*known, *_FUNCTIONS])
        raise ValueError(f"{error.args[0]!r} is not known here. Known are {listed}.") from None
    except ZeroDivisionError:
        raise ValueError(f"{shown!r} divides by zero.") from None
    except OverflowError:
        raise ValueError(f"{shown!r} is too large to be an answer here.") from None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise ValueError(f"{shown!r} is no number. Type one as 4,194,304, as 2**22 or as 64*1024*64.") from None


def _tokens(text, names):
    """The tokens of a formula in Python, with the products that are only implied: 2Nd is 2*N*d."""
    for sign, means in _SIGNS.items():
        text = text.replace(sign, means)
    text = re.sub(r"(?<=\d)[ ,'\u202f](?=\d{3}(?!\d))", "", text)
    longest_first = "|".join(sorted(map(re.escape, names), key=len, reverse=True))
    before = ""
    for token in re.findall(r"(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?|[^\W\d]\w*|\*\*|//|\S", text):
        run = longest_first and token not in _FUNCTIONS and re.fullmatch(f"(?:{longest_first})+", token)
        for part in re.findall(longest_first, token) if run else [token]:
            ends = (before[-1:].isalnum() or before == ")") and before not in _FUNCTIONS
            if ends and (part[0].isalpha() or part == "(" or (part[0].isdigit() and not before[0].isdigit())):
                yield "*"
            yield part
            before = part


def _value(node, names):
    match node:
        case ast.Constant(value=int() | float() as constant) if not isinstance(constant, bool):
            value = Fraction(str(constant))
        case ast.Name(id=name):
            if name not in names:
                raise NameError(name)
            value = Fraction(str(names[name]))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATIONS:
            value = _OPERATIONS[type(op)](_value(operand, names))
        case ast.BinOp(op=ast.Pow(), left=left, right=right):
            value = _power(_value(left, names), _value(right, names))
        case ast.BinOp(op=op, left=left, right=right) if type(op) in _OPERATIONS:
            value = Fraction(_OPERATIONS[type(op)](_value(left, names), _value(right, names)))
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            if name not in _FUNCTIONS:
                raise NameError(name)
            value = Fraction(_FUNCTIONS[name](_value(argument, names)))
        case _:
            raise SyntaxError
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > BITS:
        raise OverflowError
    return value


def _power(base, exponent):
    if abs(exponent) > POWER:
        raise OverflowError
    return base**exponent if exponent.denominator == 1 else Fraction(float(base) ** float(exponent))


# --- the file of --answers --------------------------------------------------------------------------------------------


def earlier(path):
    """The runs that the file of --answers has already -> list. ValueError where it holds something else."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            raise ValueError("a folder or a device")
        text = Path(path).read_text(encoding="utf-8-sig")
        runs = json.loads(text) if text.strip() else []
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError):
        runs = None
    if not isinstance(runs, list) or not all(
        isinstance(run, dict) and isinstance(run.get("questions"), list) for run in runs
    ):
        raise ValueError(f"{path!r} exists and is no file of answers: name another file")
    return runs


def keep(path, run, before=None):
    """Add `run`, the dict of one run of a lesson, to the file of --answers -> it as it was kept.

    before: what an earlier call returned for this run, whose place it takes. Other lessons may add to the same file.
    Raises OSError.
    """
    file = Path(path).resolve()  # of a link the file itself is replaced
    run = json.loads(json.dumps(run))
    with locked(file):
        runs = earlier(path)
        at = runs.index(before) if before in runs else len(runs)
        runs[at : at + 1] = [run]
        write_text(file, json.dumps(runs, indent=1, ensure_ascii=False) + "\n")
    return run


@contextlib.contextmanager
def locked(path):
    """In the body no other lesson writes to the file of --answers. A lock that somebody left behind does not count."""
    lock = Path(f"{path}.lock")
    while True:
        try:
            lock.open("x").close()
            break
        except FileExistsError:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > LEFT_BEHIND:
                    lock.unlink()
            time.sleep(0.02)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
