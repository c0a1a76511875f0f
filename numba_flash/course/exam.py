"""`python -m numba_flash exam`: an exam from a seed, its key, and the grading of what needs no reader."""

import json
import random
import re
import textwrap
from fractions import Fraction
from html import escape
from itertools import cycle
from pathlib import Path

from .. import output, report
from ..files import write_text
from ..lesson import check_distinct, whole_number
from ..questions import NEAR
from ..questions import number as number_from
from .exam_questions import POOL, TOPICS

LEAST = {"kind": 3}  # questions of a topic that no exam is without
FIRST, LAST = 6, 13  # lessons: those that an exam can end with
MINUTES = 60
NOT_UNDERSTOOD = "not understood"
PAGE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>Exam {seed}</title>
<style>
:root {{ color-scheme: light dark }}
pre {{ max-width: max-content; margin: 1rem auto; white-space: pre-wrap }}
</style>
<pre>{text}</pre>
</html>
"""


def add_command(command):
    sub = command("exam", run, "make an exam from a seed, print its key, or grade answers")
    sub.add_argument("--seed", type=whole_number(0), default=0, metavar="S", help="which exam (default: %(default)s)")
    length = sub.add_mutually_exclusive_group()
    length.add_argument("--questions", type=whole_number(1), metavar="K", help="how many questions")
    what = f"or as many questions as fit M minutes (default: {MINUTES})"
    length.add_argument("--minutes", type=whole_number(1), metavar="M", help=what)
    what = "ask for nothing of the lessons after LAST (default: %(default)s)"
    sub.add_argument("--upto", type=whole_number(FIRST, LAST), default=LAST, metavar="LAST", help=what)
    sub.add_argument("--key", action="store_true", help="with answers, reasons, points and common wrong answers")
    what = 'grade the answers in FILE, JSON such as {"1a": "true", "2a": "C", "5b": 4096}, as far as a program can'
    sub.add_argument("--grade", metavar="FILE", help=what)
    output.add_json(sub, "the exam, or the grades,", "page")
    what = "write the page to FILE, for the printer"
    sub.add_argument("--html", type=output.writable(".html"), metavar="FILE", help=what)
    what = "write the exam to FILE in Markdown"
    sub.add_argument("--md", type=output.writable(".md", ".markdown", ".txt"), metavar="FILE", help=what)


def run(flags):
    check_distinct(grade=flags.grade, json=flags.json, html=flags.html, md=flags.md)
    if flags.grade and flags.key:
        raise ValueError("--key is for an exam, and --grade makes none: leave one of them out")
    questions = select(flags.seed, flags.questions, flags.minutes, flags.upto)
    if flags.grade:
        page, figures = graded(flags, questions)
        markdown = None
    else:
        page, figures = list(printed(flags, questions)), as_json(flags, questions)
        markdown = "\n".join(in_markdown(flags, questions))
    if flags.md and markdown is None:
        raise ValueError(f"--md {flags.md} writes an exam, and --grade makes none: leave one of them out")
    output.show(page, figures, flags.json)
    if flags.html:
        text = "\n".join(map(report.to_text, page))
        write_text(flags.html, PAGE.format(seed=flags.seed, text=escape(text)))
    if flags.md:
        write_text(flags.md, markdown)
    for file in filter(None, (flags.html, flags.md) if flags.json != "-" else ()):
        report.console().print(f" written: {file}", soft_wrap=True)
    return 0


# --- which questions --------------------------------------------------------------------------------------------------


def select(seed, count=None, minutes=None, upto=None):
    """The questions of an exam -> list of Question; arguments and errors as for `balanced`."""
    return [POOL[name](random.Random(f"{name} {seed}")) for name in balanced(seed, count, minutes, upto)]


def balanced(seed, count=None, minutes=None, upto=None):
    """Which questions, by topic -> list of names. ValueError where it would be too small or too large an exam.

    count: so many questions; else as many as fit `minutes`. upto: the last lesson that was taught. At least three ask
    what kind of optimisation it is.
    """
    rng = random.Random(f"exam {seed}")
    pool = {name: build for name, build in POOL.items() if upto is None or build.last <= upto}
    stacks = {topic: [name for name, build in pool.items() if build.topic == topic] for topic in TOPICS}
    for stack in stacks.values():
        rng.shuffle(stack)
    chosen = [name for topic, least in LEAST.items() for name in stacks[topic][:least]]
    least = sum(LEAST.values())
    if count is not None:
        if not least <= count <= len(pool):
            raise ValueError(f"--questions {count} is no exam: pass {least} to {len(pool)}")
        minutes = sum(build.minutes for build in pool.values())
    minutes = MINUTES if minutes is None else minutes
    left = minutes - sum(POOL[name].minutes for name in chosen)
    if left < 0:
        needed = sum(POOL[name].minutes for name in chosen)
        raise ValueError(
            f"--minutes {minutes} is too short for the {least} questions on the kind: pass {needed} or more"
        )
    stacks = {topic: [name for name in stack if name not in chosen] for topic, stack in stacks.items()}
    turns = cycle([topic for topic in TOPICS if topic not in LEAST] + list(LEAST))
    while any(stacks.values()) and (count is None or len(chosen) < count):
        stack = stacks[next(turns)]
        fitting = [name for name in stack if POOL[name].minutes <= left]
        stack[:] = fitting[1:]
        if fitting:
            chosen.append(fitting[0])
            left -= POOL[fitting[0]].minutes
    order = list(TOPICS)
    return sorted(chosen, key=lambda name: order.index(POOL[name].topic))


# --- on paper ---------------------------------------------------------------------------------------------------------


def totals(questions):
    return sum(question.minutes for question in questions), sum(question.points for question in questions)


def size(questions):
    """How large an exam is, in words."""
    minutes, points = totals(questions)
    return f"{len(questions)} questions, {minutes} minutes, {points} points"


RULES = (
    "One head unless a question says otherwise. An element is an element, not a byte. FLOPs count a product and a "
    "sum as two. Integers are exact; for the rest a fraction or three digits will do. What a part asks beyond a "
    "number or a letter, answer in a sentence."
)


def written(expected):
    return (
        f"{expected:,}" if isinstance(expected, int) else f"{expected:.6g}" if isinstance(expected, float) else expected
    )


def solution(question):
    """The key of a question -> (label, text), to be printed one below the other."""
    parts = list(labelled(question))
    yield "Answer", "; ".join(f"({label}) {written(part.expected)}" for label, part in parts)
    yield "Why", question.why
    yield "Points", "; ".join(f"({label}) {part.points}" for label, part in parts)
    for points, what in question.open:
        yield "Reader", f"{points} for: {what}"
    for answer, reveals in question.wrong:
        yield "Wrong", f"{answer}: {reveals}"


def labelled(question):
    return zip("abcdefgh", question.parts, strict=False)


def about(number, question):
    return f"{number}. {question.points} points, {question.minutes} minutes, lesson {question.lesson}"


def printed(flags, questions):
    """The exam -> what a console prints, part by part."""
    yield report.heading(f"Exam {flags.seed}{', with its key' if flags.key else ''}", size(questions))
    yield ""
    yield report.prose(RULES)
    topic = None
    for number, question in enumerate(questions, 1):
        if question.topic != topic:
            topic = question.topic
            yield report.heading(TOPICS[topic].upper())
            yield ""
        yield report.heading(about(number, question))
        yield report.prose(question.text)
        if question.choices:
            yield from (hanging(*choice) for choice in question.choices)
            yield ""
        yield from (hanging(f"({label})", part.ask) for label, part in labelled(question))
        yield ""
        if question.also:
            yield report.prose(question.also)
        if flags.key:
            yield from (hanging(*line, width=8) for line in solution(question))
            yield ""


def hanging(label, text, width=5):
    """A label, and beside it its text."""
    return textwrap.fill(text, 78, initial_indent=f"   {label:<{width}}", subsequent_indent=" " * (width + 3))


def in_markdown(flags, questions):
    """The exam -> lines of Markdown."""
    yield f"# Exam {flags.seed}{', with its key' if flags.key else ''}\n"
    yield f"{size(questions)}. {RULES}\n"
    topic = None
    for number, question in enumerate(questions, 1):
        if question.topic != topic:
            topic = question.topic
            yield f"## {TOPICS[topic]}\n"
        yield f"### {about(number, question)}\n\n{question.text}\n"
        yield from (f"- **{name}** {text}" for name, text in question.choices)
        yield from [""] * bool(question.choices)
        yield from (f"- ({label}) {part.ask}" for label, part in labelled(question))
        yield f"\n{question.also}\n" if question.also else ""
        if flags.key:
            yield from (f"> **{label}**: {text}\n>" for label, text in solution(question))
            yield ""


def as_json(flags, questions):
    """The exam as data. Without --key it holds nothing that is not on the paper."""
    minutes, points = totals(questions)
    figures = {"seed": flags.seed, "minutes": minutes, "points": points, "questions": []}
    for number, question in enumerate(questions, 1):
        entry = {
            "number": number,
            "topic": question.topic,
            "lesson": question.lesson,
            "points": question.points,
            "minutes": question.minutes,
            "text": question.text,
            "choices": dict(question.choices),
            "parts": {label: part.ask for label, part in labelled(question)},
            "also": question.also,
        }
        if flags.key:
            entry |= {
                "name": question.name,
                "answers": {label: part.expected for label, part in labelled(question)},
                "points_of_parts": {label: part.points for label, part in labelled(question)},
                "open": [list(item) for item in question.open],
                "why": question.why,
                "wrong": [list(item) for item in question.wrong],
            }
        figures["questions"].append(entry)
    return figures


# --- grading ----------------------------------------------------------------------------------------------------------


def graded(flags, questions):
    """The points that a program can give -> page and figures."""
    answers = read_answers(flags.grade)
    rows, reached = [], 0
    labels = {f"{n}{label}": (part, q) for n, q in enumerate(questions, 1) for label, part in labelled(q)}
    if unknown := sorted(set(answers) - set(labels)):
        raise ValueError(
            f"--grade {flags.grade}: {', '.join(unknown)} is no part of this exam: its parts are {', '.join(labels)}; "
            "give the --seed, and the --questions or --minutes, that the exam was made with"
        )
    for label, (part, question) in labels.items():
        given = answers.get(label)
        verdict = verdict_on(given, part.expected, sizes(question), f"{question.text} {part.ask}")
        points = part.points * (verdict == "right")
        reached += points
        rows.append([label, verdict, points, part.points, "" if given is None else str(given)])
    possible = sum(part.points for part, _ in labels.values())
    to_read = totals(questions)[1] - possible
    unread = [row[0] for row in rows if row[1] == NOT_UNDERSTOOD]
    page = [report.heading(f"Exam {flags.seed}", f"{reached} of {possible} points; {to_read} more for a reader"), ""]
    page.append(report.table(["part", "verdict", "points", "of", "given"], rows))
    if unread:
        page += ["", report.prose(f"For a reader as well, since no program could tell: {', '.join(unread)}.")]
    figures = {"seed": flags.seed, "points": reached, "of": possible, "for_a_reader": to_read}
    figures["parts"] = {
        label: {"verdict": verdict, "points": points, "of": of} for label, verdict, points, of, _ in rows
    }
    return page, figures


def read_answers(path):
    """{"1a": answer, …} from a file. ValueError where it is none."""
    try:
        answers = json.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"--grade {path} cannot be read ({error.strerror}): name a file of answers") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f'--grade {path} is no JSON ({error}): write {{"1a": "true", "2a": "C"}}') from None
    write = 'write {"1a": "true", "2a": "C", "5b": 4096}'
    if not isinstance(answers, dict):
        raise ValueError(f"--grade {path} holds no answers by part: {write}")
    if several := [part for part, answer in answers.items() if isinstance(answer, dict | list)]:
        raise ValueError(f"--grade {path}: {', '.join(several)} is no answer, but several: {write}")
    return {part.strip().lower(): answer for part, answer in answers.items()}


def verdict_on(given, expected, sizes=None, asked=""):
    """ "missing", "right", "wrong" or "not understood" -> of one answer, for what is expected.

    Integers must be exact, floats to 1 %. A number may be a formula, as in a lesson: `questions.number` reads it, and
    `sizes` are the names it knows; and a word of the question, `asked`, may follow it. Of words the first one counts,
    also by its first letter.
    """
    if given is None:
        return "missing"
    if isinstance(expected, str):
        word = word_in(given, expected)
        return NOT_UNDERSTOOD if word is None else "right" if word == expected.casefold() else "wrong"
    try:
        if isinstance(given, bool):
            raise ValueError("no number")
        value = number_from(number_in(str(given), asked), sizes)
    except ValueError:
        return NOT_UNDERSTOOD
    off = abs(value - Fraction(expected))
    close = off <= NEAR * abs(Fraction(expected)) if isinstance(expected, float) else off == 0
    return "right" if close else "wrong"


def word_in(given, expected):
    """Which of the words that would be an answer in place of `expected` is given, in lower case; None: none, or two."""
    if isinstance(given, bool) and expected in ("yes", "no"):
        given = "yes" if given else "no"
    pair = next((pair for pair in (("true", "false"), ("yes", "no")) if expected in pair), None)
    words = {short: word for word in pair for short in (word, word[0])} if pair else {c: c for c in "abcdefgh"}
    text = re.sub(r"^(?:answer|option|choice)\b", "", str(given).strip().casefold()).lstrip(" ([{*\"'`:")
    first, rest = re.match(r"(\w*)(.*)", text, re.DOTALL).groups()
    joined, other = re.match(r"(\s*/\s*|\W*\b(?:or|and)\b\W*|\W*)(\w*)", rest).groups()
    is_word = not pair or len(other) > 1 or joined.strip(" ,.;:")  # not the N of "yes, N is large"
    two = is_word and words.get(other, words.get(first)) != words.get(first)
    sentence = not pair and re.match(r"\s+\w", rest)  # "a tile is ..." is no letter
    return None if two or sentence else words.get(first)


def number_in(text, asked):
    """What of an answer is the number: without a sign before it, and without a full stop or a word of the question."""
    text = re.sub(r"^\s*(?:=|≈|~)\s*", "", text).strip().rstrip(".")
    words = {word.rstrip("s") for word in re.findall("[a-z]{4,}", asked.lower())}
    unit = re.search(r"(?<=[\w)\]⌉])\s+([A-Za-z]{4,})$", text)
    wanted = unit and unit[1].lower().rstrip("s") in words
    if wanted and not (unit[1].lower().startswith("byte") and "element" in words):
        return text[: unit.start()]
    return text


def sizes(question):
    """The sizes that a question gives, by their names on the paper: an answer may be a formula in them."""
    text = " ".join([question.text, *(part.ask for part in question.parts)])
    given = re.findall(r"\b(N|N_k|n|d|T|Br|Bc|Tr|Tc|M) = (\d[\d,]*\d|\d)", text)
    return {name: int(value.replace(",", "")) for name, value in given}
