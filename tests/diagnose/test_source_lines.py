"""The line at which an error came up, though it is raised later."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tuner.diagnose.source_lines import LineWatch


class Queue:
    """Of a device that computes when it is waited for, as MindSpore op by op."""

    def __init__(self):
        self.waiting = []

    def wait(self):
        while self.waiting:
            if self.waiting.pop(0) == "wrong":
                raise ValueError("a shape")


def inner(queue, value):
    queue.waiting.append("right")
    return value


def line_after_a_call(queue):
    queue.waiting.append(inner(queue, "wrong"))
    queue.waiting.append("right")
    return len(queue.waiting)


def line_in_a_call(queue):
    queue.waiting.append("right")
    return in_turn(queue)


def in_turn(queue):
    queue.waiting.append("wrong")  # the line
    return queue.waiting.append("right")


def raises_itself(queue):
    queue.waiting.append("right")
    raise KeyError("x")


def comes_through(queue):
    return inner(queue, "right")


def line_of(body):
    """Of what a body raises, in a thread that is traced already."""
    queue = Queue()
    watch = LineWatch(queue.wait)
    before = sys.gettrace()
    with pytest.raises((ValueError, KeyError)) as raised, watch.watching():
        body(queue)
        queue.wait()
    assert sys.gettrace() is before
    place, text = watch.line_of(raised.value)
    name, _, number = place.partition(":")
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    assert (name, lines[int(number) - 1].strip()) == (Path(__file__).name, text)
    return text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (line_after_a_call, 'queue.waiting.append(inner(queue, "wrong"))'),
        (line_in_a_call, 'queue.waiting.append("wrong")  # the line'),
        (raises_itself, 'raise KeyError("x")'),
    ],
)
def test_the_line_that_queued_it_is_named(body, text):
    assert line_of(body) == text


def test_without_an_error_everything_is_waited_for():
    queue = Queue()
    watch = LineWatch(queue.wait)
    assert watch.line_of(ValueError()) == ("", "")
    with watch.watching():
        assert comes_through(queue) == "right"
    assert queue.waiting == []
