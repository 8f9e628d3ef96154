"""Progress on the terminal: the step, what it is doing, and the time left."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn

from horizonserve.bench.compare import Watch


class _Clocked(Progress):
    """A progress whose bar follows the clock between two reports."""

    tick: Callable[[], None] | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.tick:
            self.tick()
        return super().get_renderables()


class Display(Watch):
    """Shows steps, one after another, against a guess of what all of them take.

    The guess is only for the bar: a step that takes longer holds it, a shorter one moves it on.
    """

    def __init__(self, console: Console, total_s: float) -> None:
        self.console = console
        self._done_s = 0.0
        self._step: tuple[float, float] | None = None  # when it began, its guess
        self._progress = _Clocked(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[left]}"),
            TextColumn("[dim]{task.fields[words]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("", total=total_s, left="", words="")
        self._progress.tick = self._tick

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    @property
    def total_s(self) -> float:
        return self._progress.tasks[0].total or 0.0

    def expect(self, total_s: float) -> None:
        """Everything will take so long, what is already done included."""
        self._progress.update(self._task, total=total_s)

    @property
    def done_s(self) -> float:
        """Guesses of the steps that are over."""
        return self._done_s

    @contextlib.contextmanager
    def step(self, name: str, guess_s: float) -> Iterator[Callable[[str], None]]:
        self._step = time.monotonic(), guess_s
        self._progress.update(self._task, description=escape(name), words="")
        if not self.console.is_terminal:
            self.console.print(f"{name} ...", highlight=False, markup=False)
        try:
            yield lambda words: self._progress.update(self._task, words=escape(words[:60]))
        finally:
            self._step = None
        self._done_s += guess_s

    def skip(self, guess_s: float) -> None:
        self._done_s += guess_s

    def _tick(self) -> None:
        inside_s = 0.0
        if self._step:
            began_s, guess_s = self._step
            inside_s = min(time.monotonic() - began_s, guess_s)
        left_s = max(0.0, self.total_s - self._done_s - inside_s)
        self._progress.update(
            self._task,
            completed=self._done_s + inside_s,
            left=f"about {left_s / 60:.0f} min left" if left_s >= 90 else f"{left_s:.0f} s left",
        )
