"""Reward functions that hold the interpreter: one regular expression each, and no sleep in it.

What they did is a line in the file `path`, written with O_APPEND when a call begins and when it has
ended, so that a call that was cut off has one line and a finished one two.
"""

import json
import math
import os
import re
import time

STARS = 5
"""The time of `a*a*a*a*a*b` on n letters grows as n to this power."""

PATTERN = re.compile("a*" * STARS + "b")


def letters_for(cpu_s: float) -> int:
    """How many letters PATTERN needs to search for at least `cpu_s` on this machine.

    Measured at the first length that takes a second, and scaled from there.
    Example: 1.8 s at 160 letters, 24 s wanted: 160 x (24 / 1.8) ^ (1 / 5) = 269 letters.
    """
    letters, took_s = 100, 0.0
    while took_s < 1.0:
        letters += 20
        begin_s = time.process_time()
        PATTERN.match("a" * letters)
        took_s = time.process_time() - begin_s
    return round(letters * math.pow(cpu_s / took_s, 1 / STARS))


def say(path: str, **fields: object) -> None:
    """Append one line, whole whoever else writes."""
    descriptor = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    try:
        os.write(descriptor, (json.dumps({"pid": os.getpid(), **fields}) + "\n").encode())
    finally:
        os.close(descriptor)


def holds(texts: list[str], letters: list[int], path: str) -> list[float]:
    """Rewards 0, 1, 2, ... after one search through `letters` letters."""
    say(path, what="begun", group=texts[0])
    begin_s = time.monotonic()
    assert PATTERN.match("a" * letters[0]) is None
    say(path, what="ended", group=texts[0], held_s=time.monotonic() - begin_s)
    return [float(number) for number in range(len(texts))]


def never_returns(texts: list[str], forever: list[bool], path: str) -> list[float]:
    """The same; but where the row says `forever` the search would last longer than the world."""
    say(path, what="begun", group=texts[0])
    if forever[0]:
        # Each letter doubles it: 1 s at about 25 of them.
        re.match("(a|a)*b", "a" * 200)
    say(path, what="ended", group=texts[0])
    return [float(number) for number in range(len(texts))]


def parses(texts: list[str]) -> list[float | None]:
    """The number that a text begins with; no number, no opinion."""
    words = [text.split()[0] for text in texts]
    return [float(word) if word.isdecimal() else None for word in words]
