"""Slots over time: from a step log to rows, spans and entrances that were worked out by hand."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from horizonserve.bench.lending_picture import (
    Entrance,
    Span,
    Step,
    busiest_s,
    load,
    picture,
    plot,
    worded,
)

#: s1 ran, s1- lent, +s1 entered; ! broken, * without a first token yet. s is short, l long.
LOG = [
    (50.00, "l1 s1"),
    (50.25, "l1- s1 +s2*"),
    (50.50, "l1- s1- s2"),
    (50.75, "l1 s1"),  # s2 has left
    (51.00, "l1- s1 +s3*"),
    (51.25, "l1 s1- s3! +s4*"),  # s4 is refused, as its later entrance tells
    (51.50, "s1"),  # l1 and s3 have left; it took 0.2 s, then the stage was idle
    (53.00, "+l2*"),
    (53.50, "l2 +s4*"),
]
LIMIT_MS = 200.0


def request(text: str) -> dict[str, Any]:
    name = text.strip("+-!*")
    return {
        "id": name,
        "path": "long" if name[0] == "l" else "short",
        "state": "entered" if text[0] == "+" else "lent" if "-" in text else "ran",
        "tokens": 1,
        "slack_ms": 10.0 * int(name[1]),
        "broken": "!" in text,
        "first_token": "*" not in text,
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "steps.jsonl"
    with file.open("w") as lines:
        for time_s, requests in LOG:
            entry = {
                "time_s": time_s,
                "limit_ms": LIMIT_MS,
                "given_up": 0,
                "requests": list(map(request, requests.split())),
            }
            lines.write(json.dumps(entry) + "\n")
    return file


def test_a_step_ends_where_the_next_starts_unless_all_its_requests_have_left(file: Path) -> None:
    times = [(step.start_s, step.end_s) for step in load(file)]
    assert times[:2] == [(0.0, 0.25), (0.25, 0.5)]
    assert times[6:] == [(1.5, pytest.approx(1.7)), (3.0, 3.5), (3.5, pytest.approx(3.7))]


def test_rows_spans_and_entrances(file: Path) -> None:
    spans, entrances = picture(load(file))
    end_s = pytest.approx(1.7)
    assert spans == [
        Span(0, 0.0, 0.25, "long", False),
        Span(0, 0.25, 0.75, "long", True),
        Span(0, 0.75, 1.0, "long", False),
        Span(0, 1.0, 1.25, "long", True),
        Span(0, 1.25, 1.5, "long", False),
        Span(1, 0.0, 0.5, "short", False),
        Span(1, 0.5, 0.75, "short", True),
        Span(1, 0.75, 1.25, "short", False),
        Span(1, 1.25, 1.5, "short", True),
        Span(1, 1.5, end_s, "short", False),
        Span(2, 0.25, 0.75, "short", False),
        # s3 gets the row of s2, and the last two get those of l1 and s1.
        Span(2, 1.0, 1.5, "short", False),
        Span(0, 3.0, pytest.approx(3.7), "long", False),
        Span(1, 3.5, pytest.approx(3.7), "short", False),
    ]
    # Nobody lent when l2 and s4 entered, and s4 was refused when somebody did.
    assert entrances == [Entrance(2, 0.25, 20.0, 1, True), Entrance(2, 1.0, 30.0, 1, False)]


def test_one_that_was_preempted_comes_back_as_another_stay_and_saves_no_first_token() -> None:
    texts = ("s1 s2", "s1", "s1 s3", "s1- s3 +s2")
    steps = [Step(t, t + 1.0, list(map(request, text.split()))) for t, text in enumerate(texts)]
    spans, entrances = picture(steps)
    assert [span for span in spans if span.row == 1] == [
        Span(1, 0, 1.0, "short", False),
        Span(1, 2, 4.0, "short", False),
    ]
    assert [span for span in spans if span.row == 2] == [Span(2, 3, 4.0, "short", False)]
    assert entrances == []


def test_a_long_request_is_not_said_to_be_kept() -> None:
    texts = ("s1-  +l2*", "s1 l2")
    steps = [Step(t, t + 1.0, list(map(request, text.split()))) for t, text in enumerate(texts)]
    assert picture(steps).entrances == [Entrance(1, 0, 20.0, 1, False)]


@pytest.mark.parametrize(("for_s", "start_s"), [(0.5, 0.25), (1.5, 0.0), (0.25, 0.5), (9.0, 0.0)])
def test_the_window_with_the_most_lending(file: Path, for_s: float, start_s: float) -> None:
    # Lent slot seconds per step: 0, 0.25, 0.5, 0, 0.25, 0.25, 0, 0, 0.
    assert busiest_s(load(file), for_s) == start_s


def test_the_window_does_not_end_after_the_log() -> None:
    steps = [Step(float(t), t + 1.0, [request("s1-" if t == 9 else "s1")]) for t in range(10)]
    assert busiest_s(steps, 4.0) == 6.0


def test_words_are_for_the_narrowest_that_was_kept_and_do_not_cover_each_other() -> None:
    def at(time_s: float, slack_ms: float, kept: bool = True) -> Entrance:
        return Entrance(0, time_s, slack_ms, 1, kept)

    narrow, beside, far, wide = at(1.0, 5.0), at(1.5, 6.0), at(8.0, 20.0), at(14.0, 90.0)
    others = [at(5.0, 1.0, kept=False), at(25.0, 2.0), at(-1.0, 3.0)]
    assert worded([wide, far, beside, narrow, *others], 0.0, 15.0) == [narrow, far]


def test_a_log_of_a_killed_server_lacks_its_last_line_alone(file: Path) -> None:
    whole = load(file)
    file.write_bytes(file.read_bytes()[:-9])
    assert len(load(file)) == len(whole) - 1


@pytest.mark.parametrize("text", ["", "half", "text\n", "[]\n", '{"n": 1}\n'])
def test_what_is_no_step_log_is_refused_by_name(tmp_path: Path, text: str) -> None:
    file = tmp_path / "other.txt"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"other\.txt: is no step log"):
        load(file)


def test_a_picture_is_drawn(file: Path) -> None:
    pytest.importorskip("matplotlib")
    png = file.with_suffix(".png")
    plot(load(file), png, "a title", 0.0, 6.0)
    content = png.read_bytes()
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1200, 600)
