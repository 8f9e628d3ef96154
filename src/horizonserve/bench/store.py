"""Results on disk: one JSON-lines file per run, so that an interrupted experiment goes on.

    line 1      {"run": {...}}      what was run, under which settings and targets
    line 2...   {"result": {...}}   each request as it ended
    last line   {"end": {...}}      how long it took, and what else the machine did meanwhile

While it is written a run is called ``NAME.part``; complete, it is renamed to ``NAME.jsonl``. Only
complete runs are ever read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from horizonserve.bench.metrics import Targets
from horizonserve.bench.result import Result
from horizonserve.slo import RequestClass


class StoreError(ValueError):
    """A results file is not what it should be; the message names it."""


@dataclass(frozen=True, slots=True)
class Run:
    """A complete run."""

    head: dict[str, Any]
    results: list[Result]
    end: dict[str, Any]

    @property
    def targets(self) -> Targets:
        """What was promised."""
        tbt_ms = self.head.get("tbt_ms")
        return Targets(
            {RequestClass(name): ms / 1_000 for name, ms in self.head["slo_ms"].items()},
            None if tbt_ms is None else tbt_ms / 1_000,
        )


class Writer:
    """Appends to the file of a run that is under way."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def result(self, result: Result) -> None:
        """Record a request as soon as it ended."""
        self._line("result", result.to_json())

    def _line(self, kind: str, content: Mapping[str, Any]) -> None:
        self._file.write(json.dumps({kind: content}) + "\n")
        self._file.flush()


class Store:
    """A directory of runs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def path(self, name: str) -> Path:
        """Where a complete run of that name is."""
        return self.directory / f"{name}.jsonl"

    def done(self, name: str, head: Mapping[str, Any]) -> bool:
        """Whether there is a complete run of that name.

        Raises:
            StoreError: there is one, of a different experiment.
        """
        if not self.path(name).exists():
            return False
        found = self.load(name).head
        # Through JSON, as the file went: it knows no tuples.
        wanted = json.loads(json.dumps(head))
        different = [key for key in wanted if found.get(key) != wanted[key]]
        if different:
            raise StoreError(
                f"{self.path(name)}: made with a different {different[0]}"
                f" ({found.get(different[0])!r}, now {wanted[different[0]]!r});"
                " choose another results directory"
            )
        return True

    @contextlib.contextmanager
    def writing(self, name: str, head: Mapping[str, Any], end: dict[str, Any]) -> Iterator[Writer]:
        """Record a run; it counts only if the block ends well. ``end`` is read at that point."""
        part = self.directory / f"{name}.part"
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", encoding="utf-8") as file:
            writer = Writer(file)
            writer._line("run", head)
            yield writer
            writer._line("end", end)
            os.fsync(file.fileno())
        part.rename(self.path(name))

    def load(self, name: str) -> Run:
        """A complete run.

        Raises:
            StoreError: there is none, or it is damaged.
        """
        path = self.path(name)
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
            results = [Result.from_json(line["result"]) for line in lines[1:-1]]
            return Run(lines[0]["run"], results, lines[-1]["end"])
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            raise StoreError(f"{path}: not a complete run ({error}); remove it") from error

    def note(self, name: str, content: Mapping[str, Any]) -> None:
        """Write a small JSON file, all of it or nothing."""
        aside = self.directory / f".{name}.json"
        aside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        aside.rename(self.directory / f"{name}.json")

    def noted(self, name: str) -> dict[str, Any] | None:
        """What ``note`` wrote, or None."""
        path = self.directory / f"{name}.json"
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: unreadable ({error}); remove it") from error
        return dict(content)
