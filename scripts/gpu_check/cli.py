"""The command: run every part in processes of its own, judge its claims, print a table."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from gpu_check import children
from gpu_check.child import NotTested
from gpu_check.mps import Mps, without_mps
from gpu_check.parts import PARTS, Part
from gpu_check.verdicts import Figures, Finding, Verdict

#: Kept from the limit for ending what runs, the MPS daemon with it.
RESERVE_S: Final = 25.0
IDENTIFY_S: Final = 30.0


class Check:
    """One run over the parts."""

    def __init__(self, out: Path, limit_s: float, part_limit_s: float) -> None:
        self._until_s = time.monotonic() + limit_s - RESERVE_S
        self._part_limit_s = part_limit_s
        self._processes = out / "processes"
        self._mps_directory = out / "mps"
        self.mps = Mps(os.environ, self._mps_directory)

    def identify(self) -> Figures:
        """The device and the versions. Raises NotTested: there is no usable driver."""
        directory = self._processes / "identify"
        environment = without_mps(os.environ, self._mps_directory)
        return children.run("identify", ("shared",), directory, environment, IDENTIFY_S)[0]

    def figures(self, part: Part) -> list[Figures]:
        """The figures of a part: those of its sides, run by run. Raises NotTested."""
        if self._until_s - time.monotonic() < min(part.needs_s, self._part_limit_s):
            raise NotTested("out of time")
        if not part.mps:
            return self._run(part, without_mps(os.environ, self._mps_directory))
        try:
            return self._run(part, self.mps.environment())
        except NotTested:
            # A daemon whose client was killed may be of no use to the next.
            self.mps.stop()
            raise

    def _run(self, part: Part, environment: dict[str, str]) -> list[Figures]:
        end_s = min(self._until_s, time.monotonic() + min(part.limit_s, self._part_limit_s))
        found = []
        for number, variables in enumerate(part.runs):
            found += children.run(
                part.probe,
                part.sides,
                self._processes / f"{part.name}-{number}",
                environment | dict(variables),
                end_s - time.monotonic(),
            )
        for figures in found:
            if figures.get("mps", part.mps) != part.mps:
                raise NotTested(
                    "its processes are not served by MPS"
                    if part.mps
                    else "an MPS daemon serves its processes"
                )
        return found


def judged(part: Part, figures: list[Figures] | str) -> dict[str, Finding]:
    """A finding for each claim of a part; ``figures`` may be why there are none."""
    if isinstance(figures, str):
        return {name: Finding(Verdict.UNTESTED, figures) for name in part.claims}
    found = {}
    for name, claim in part.claims.items():
        try:
            found[name] = claim.judge(figures)
        # The other claims, and the figures as they are, are worth more than a clean end.
        except Exception as error:
            found[name] = Finding(Verdict.UNTESTED, f"the figures cannot be judged: {error!r}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """0: no claim fails; 1: one does; 2: there is no usable driver."""
    arguments = _parse(argv)
    # So that what was started is also ended when the check itself is.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out: Path = arguments.out.resolve()
    for name in ("processes", "mps"):
        shutil.rmtree(out / name, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    check = Check(out, arguments.limit_s, arguments.part_limit_s)
    report: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": None,
        "parts": {},
        "claims": {},
    }
    usable = True
    with (out / "gpu_check.jsonl").open("w") as lines:
        try:
            try:
                report["device"] = check.identify()
                refusal = ""
            except NotTested as error:
                usable, refusal = False, f"no usable driver: {error}"
            _append(lines, {"device": report["device"], "date": report["date"]})
            for part in parts:
                entry = _run(check, part, refusal)
                report["parts"][part.name] = {
                    key: entry[key] for key in ("took_s", "figures", "reason")
                }
                report["claims"] |= entry["claims"]
                _append(lines, {"part": part.name, **entry})
                ended = ", ".join(claim["verdict"] for claim in entry["claims"].values())
                print(f"{part.name}: {ended} ({entry['took_s']:.0f} s)", flush=True)
        finally:
            try:
                check.mps.stop()
            except NotTested as error:
                print(f"gpu_check: {error}", file=sys.stderr)
    (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    _print(report, out / "gpu_check.json")
    fails = any(claim["verdict"] == Verdict.FAILS for claim in report["claims"].values())
    return 2 if not usable else 1 if fails else 0


def _run(check: Check, part: Part, refusal: str) -> dict[str, Any]:
    """What one part found, as it is reported; ``refusal`` is why it is not to be run."""
    begin_s = time.monotonic()
    figures: list[Figures] | str
    try:
        figures = refusal or check.figures(part)
    except NotTested as error:
        figures = str(error)
    tested = not isinstance(figures, str)
    return {
        "took_s": round(time.monotonic() - begin_s, 2),
        "figures": figures if tested else None,
        "reason": None if tested else figures,
        "claims": {
            name: {
                "text": part.claims[name].text,
                "verdict": finding.verdict,
                "why": finding.why,
            }
            for name, finding in judged(part, figures).items()
        },
    }


def _append(lines: Any, entry: dict[str, Any]) -> None:
    lines.write(json.dumps(entry) + "\n")
    lines.flush()


def _print(report: dict[str, Any], file: Path) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    colours = {Verdict.HOLDS: "green", Verdict.FAILS: "red", Verdict.UNTESTED: "yellow"}
    device = report["device"] or {"device": "no device"}
    title = ", ".join(str(device[key]) for key in ("device", "driver") if device.get(key))
    table = Table(title=f"{title}, {report['date']}", show_lines=True)
    for heading in ("claim", "verdict", "figures, or why not"):
        table.add_column(heading)
    for claim in report["claims"].values():
        verdict = Verdict(claim["verdict"])
        coloured = f"[{colours[verdict]}]{verdict}[/]"
        table.add_row(escape(claim["text"]), coloured, escape(claim["why"]))
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table)
    console.print(f"details in {file}", soft_wrap=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    add = parser.add_argument
    names = [part.name for part in PARTS]
    add("--out", type=Path, required=True, help="results, logs and the MPS daemon's files")
    add("--limit-s", type=float, default=600, help="of everything (default: %(default)s)")
    add("--part-limit-s", type=float, default=600, help="of each part, at most its own limit")
    add("--only", nargs="+", choices=names, metavar="PART", help=f"of: {', '.join(names)}")
    return parser.parse_args(argv)
