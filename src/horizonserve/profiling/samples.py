"""Measured requests on disk, so that a sweep that was interrupted goes on.

    line 1      {"sweep": {...}}     what is measured, where and how
    line 2...   {"sample": {...}}    a request that was answered
                {"refused": {...}}   a size that the server does not take, and why

Every line is written as it comes. A last line that was cut short is dropped.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from horizonserve.profiling.plan import Cell


class SamplesError(ValueError):
    """The file belongs to another sweep, or is none; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A request that was alone on the server."""

    #: Position of its size in the sweep's plan, and which request of that size it was.
    cell: int
    turn: int
    first_s: float
    #: As the server counts them, media included; 0 where it does not say: only text answers do.
    prompt_tokens: int
    tpot_s: float | None


class Samples:
    """The samples of one sweep."""

    def __init__(self, path: Path, sweep: dict[str, Any]) -> None:
        """Open the file, or make it; ``sweep`` says what was measured and must be the same again.

        Raises:
            SamplesError: it is of another sweep, or damaged.
            OSError: it cannot be read or written.
        """
        self.path = path
        self.samples: list[Sample] = []
        #: Position of a size that is not taken -> why.
        self.refused: dict[int, str] = {}
        plain = json.loads(json.dumps(sweep))
        if path.exists():
            self._read(plain)
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._write("sweep", plain)

    def _read(self, sweep: dict[str, Any]) -> None:
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            found = lines[0]["sweep"] if lines else sweep
            different = [key for key in sweep if found.get(key) != sweep[key]]
            if different:
                what = different[0]
                how = (
                    "other classes or sizes"
                    if what == "plan"
                    else f"{what}: {found.get(what)!r}, now {sweep[what]!r}"
                )
                raise SamplesError(
                    f"{self.path}: holds samples of another sweep ({how}); go on with that one,"
                    " remove the file, or choose another --out"
                )
            sizes = range(len(sweep.get("plan", ())))
            for line in lines[1:]:
                if "sample" in line:
                    self.samples.append(Sample(**line["sample"]))
                    sizes.index(self.samples[-1].cell)
                else:
                    self.refused[line["refused"]["cell"]] = line["refused"]["why"]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            if isinstance(error, SamplesError):
                raise
            raise SamplesError(f"{self.path}: damaged ({error}); remove it") from error
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")

    def add(self, sample: Sample) -> None:
        """Keep a sample."""
        self.samples.append(sample)
        self._write("sample", asdict(sample))

    def refuse(self, cell: int, why: str) -> None:
        """Note that the server does not take requests of this size."""
        self.refused[cell] = why
        self._write("refused", {"cell": cell, "why": why})

    def taken(self) -> list[Sample]:
        """Those of sizes that the server takes; a size may be refused after it was answered."""
        return [sample for sample in self.samples if sample.cell not in self.refused]

    def of(self, cell: int) -> list[Sample]:
        """The samples of one size."""
        return [sample for sample in self.samples if sample.cell == cell]

    def close(self) -> None:
        """No more is written."""
        self._file.close()

    def _write(self, kind: str, content: dict[str, Any]) -> None:
        self._file.write(json.dumps({kind: content}) + "\n")
        self._file.flush()


def sweep_of(plan: list[Cell], **facts: Any) -> dict[str, Any]:
    """What makes a sweep what it is."""
    return {**facts, "plan": [cell.to_json() for cell in plan]}
