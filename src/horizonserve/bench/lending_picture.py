"""The slots of the shared stage over time, from a step log."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Final, NamedTuple

#: Colours that the colour-blind tell apart (Okabe and Ito).
_COLOURS: Final = {"short": "#0072B2", "long": "#D55E00"}
#: So many entrances get words, and so much of the picture each.
_WORDED: Final = 2
_WORDS_SHARE: Final = 0.4


class Step(NamedTuple):
    """A step of the log; times in seconds from the log's first step."""

    start_s: float
    end_s: float
    #: As ``horizonserve.serving.step_log.entry`` says.
    requests: list[dict[str, Any]]

    @property
    def lent(self) -> int:
        """Requests that lent their place."""
        return sum(request["state"] == "lent" for request in self.requests)


class Span(NamedTuple):
    """A time in which the request in a row ran throughout, or lent its place throughout."""

    row: int
    start_s: float
    end_s: float
    path: str
    lent: bool


class Entrance(NamedTuple):
    """A request without a first token that entered at a step in which others lent."""

    row: int
    time_s: float
    #: Time to its first-response deadline.
    slack_ms: float
    #: How many lent.
    lent: int
    #: Whether the log shows its first response, and that it was in time; a long request's is made
    #: downstream, of which the log knows nothing.
    kept: bool


class Picture(NamedTuple):
    """What there is to draw."""

    spans: list[Span]
    entrances: list[Entrance]


def load(file: Path) -> list[Step]:
    """The steps of a file that a ``StepLog`` wrote.

    A step ends where the next one starts. If none of its requests are in that one, the stage may
    have been idle in between; then a step takes what was predicted for it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no step log, or holds no step yet.
    """
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the server was killed while it wrote
    try:
        every = [json.loads(line) for line in lines]
        entries = [entry for entry in every if "estimate_s" not in entry]
        zero_s = entries[0]["time_s"]
        return [
            Step(entry["time_s"] - zero_s, _end_s(entry, after) - zero_s, entry["requests"])
            for entry, after in zip(entries, [*entries[1:], None], strict=True)
        ]
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{file}: is no step log, or holds no step yet") from error


def _end_s(entry: dict[str, Any], after: dict[str, Any] | None) -> float:
    predicted_s: float = entry["time_s"] + entry["limit_ms"] / 1e3
    if after is None:
        return predicted_s
    next_s: float = after["time_s"]
    here = {request["id"] for request in entry["requests"]}
    if any(request["id"] in here for request in after["requests"]):
        return next_s
    return min(next_s, predicted_s)


def picture(steps: Sequence[Step]) -> Picture:
    """Give every request the lowest row that is free while it is in the stage, and follow it."""
    in_time: dict[str, bool] = {}
    for step in steps:
        for request in step.requests:
            if request["first_token"]:
                in_time.setdefault(request["id"], not request["broken"])

    spans: list[Span] = []
    entrances: list[Entrance] = []
    free_from: list[int] = []  # of each row, the step from which on it is free
    for stay in _stays(steps):
        first, last = stay[0][0], stay[-1][0]
        row = next((row for row, free in enumerate(free_from) if free <= first), len(free_from))
        free_from[row : row + 1] = [last + 1]
        begin = len(spans)
        for index, request in stay:
            step, state, path = steps[index], request["state"], request["path"]
            start_s = step.start_s
            if len(spans) > begin and spans[-1][2:] == (start_s, path, state == "lent"):
                start_s = spans.pop().start_s
            spans.append(Span(row, start_s, step.end_s, path, state == "lent"))
            if state == "entered" and step.lent and not request["first_token"]:
                kept = path == "short" and in_time.get(request["id"], False)
                entrances.append(Entrance(row, step.start_s, request["slack_ms"], step.lent, kept))
    return Picture(spans, entrances)


def _stays(steps: Sequence[Step]) -> list[list[tuple[int, dict[str, Any]]]]:
    """The step and what it says of a request, for each time that one is in the stage.

    One that enters again was preempted, or it was refused the first time and never was inside.
    """
    stays = []
    latest: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for index, step in enumerate(steps):
        for request in step.requests:
            if request["state"] == "entered" or request["id"] not in latest:
                latest[request["id"]] = []
                stays.append(latest[request["id"]])
            latest[request["id"]].append((index, request))

    def refused(stay: list[tuple[int, dict[str, Any]]]) -> bool:
        _, request = stay[-1]
        return request["state"] == "entered" and latest[request["id"]] is not stay

    return [stay for stay in stays if not refused(stay)]


def busiest_s(steps: Sequence[Step], for_s: float) -> float:
    """Where to start a picture of ``for_s`` seconds to see the most slot time lent."""
    starts_s = [step.start_s for step in steps]
    lent_s = [0.0, *accumulate(step.lent * (step.end_s - step.start_s) for step in steps)]
    ends = [bisect_left(starts_s, start_s + for_s) for start_s in starts_s]
    best = max(range(len(steps)), key=lambda index: lent_s[ends[index]] - lent_s[index])
    return max(0.0, min(starts_s[best], steps[-1].end_s - for_s))


def worded(entrances: Sequence[Entrance], from_s: float, for_s: float) -> list[Entrance]:
    """Those to say in words: kept by the narrowest margin, and far enough apart to be read."""
    chosen: list[Entrance] = []
    for entrance in sorted(entrances, key=lambda entrance: entrance.slack_ms):
        inside = from_s <= entrance.time_s < from_s + for_s
        apart = all(abs(entrance.time_s - o.time_s) >= _WORDS_SHARE * for_s for o in chosen)
        if entrance.kept and inside and apart and len(chosen) < _WORDED:
            chosen.append(entrance)
    return chosen


def plot(steps: Sequence[Step], file: Path, title: str, from_s: float, for_s: float) -> None:
    """Draw ``for_s`` seconds of the log from ``from_s`` on, 1200 x 600 pixels.

    Raises:
        ImportError: matplotlib is not installed (``horizonserve[plot]``).
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    until_s = from_s + for_s
    spans, entrances = picture(steps)
    spans = [span for span in spans if span.end_s > from_s and span.start_s < until_s]
    entrances = [entrance for entrance in entrances if from_s <= entrance.time_s < until_s]
    rows = 1 + max((span.row for span in spans), default=0)
    looks: dict[tuple[str, bool], dict[str, Any]] = {
        (path, lent): {
            "facecolor": "white" if lent else colour,
            # White ends tell two requests apart that follow each other in a row.
            "edgecolor": colour if lent else "white",
            "hatch": "////" if lent else None,
            "linewidth": 0.6,
        }
        for path, colour in _COLOURS.items()
        for lent in (False, True)
    }
    marker: dict[str, Any] = {"marker": "v", "color": "black", "linestyle": "none", "markersize": 8}

    figure, axis = pyplot.subplots(figsize=(12, 6), dpi=100, layout="constrained")
    for (path, lent), look in looks.items():
        for row in range(rows):
            of_row = [
                (span.start_s, span.end_s - span.start_s)
                for span in spans
                if (span.row, span.path, span.lent) == (row, path, lent)
            ]
            axis.broken_barh(of_row, (row + 0.6, 0.8), **look)
    for kept, fill in ((True, "full"), (False, "none")):
        some = [entrance for entrance in entrances if entrance.kept is kept]
        axis.plot(
            [entrance.time_s for entrance in some],
            [entrance.row + 1.4 for entrance in some],
            fillstyle=fill,
            **marker,
        )
    for entrance in worded(entrances, from_s, for_s):
        half_s = _WORDS_SHARE * for_s / 2
        axis.annotate(
            f"entered {entrance.slack_ms:.0f} ms before its deadline\nwhile {entrance.lent} lent",
            (entrance.time_s, entrance.row + 1.4),
            (min(max(entrance.time_s, from_s + half_s), until_s - half_s), rows + 0.75),
            arrowprops={"arrowstyle": "-", "linewidth": 1.0, "shrinkB": 4},
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "black"},
            ha="center",
            va="bottom",
        )
    axis.set_xlim(from_s, until_s)
    axis.set_ylim(0.4, rows + 0.6 + max(1.0, 0.18 * rows))
    axis.set_yticks(range(1, rows + 1))
    axis.set_xlabel("time since the log's first step (s)")
    axis.set_ylabel("slot of the shared stage")
    axis.set_title(title)
    figure.legend(
        handles=[
            *(
                Patch(label=f"{path} request, {'lent its place' if lent else 'ran'}", **look)
                for (path, lent), look in looks.items()
            ),
            Line2D([], [], label="entered while others lent; first token in time", **marker),
            Line2D(
                [],
                [],
                label="entered while others lent; long, late or not known",
                fillstyle="none",
                **marker,
            ),
        ],
        loc="outside lower center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(file)
    pyplot.close(figure)
