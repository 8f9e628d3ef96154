"""One process of a part: runs a probe and writes what it found, or why there is nothing."""

from __future__ import annotations

import faulthandler
import json
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizonserve.spatial.driver import DriverError
from horizonserve.spatial.pressure import SourceError


class NotTested(RuntimeError):
    """Why a claim could not be tested."""


@dataclass(frozen=True)
class Room:
    """What a probe is told, and where it meets the process beside it."""

    #: "shared" or "downstream"; of a part with one process, "shared".
    side: str
    #: How many processes meet.
    people: int
    directory: Path

    def meet(self, point: str, wait_s: float = 60) -> None:
        """Go on when every process of the part has come to ``point``.

        Raises:
            NotTested: one did not come.
        """
        (self.directory / f"{point}.{self.side}").touch()
        until_s = time.monotonic() + wait_s
        while len(list(self.directory.glob(f"{point}.*"))) < self.people:
            if time.monotonic() > until_s:
                raise NotTested(f"the other process did not come to {point}")
            time.sleep(0.0005)


def main(probe: str, side: str, people: str, directory: str) -> None:
    from gpu_check import probes, torch_probes

    faulthandler.enable()  # a crash in a driver leaves its place in the log
    room = Room(side, int(people), Path(directory))
    run = getattr(probes, probe, None) or getattr(torch_probes, probe)
    outcome: dict[str, Any]
    try:
        outcome = {"figures": run(room)}
    except (NotTested, DriverError, SourceError) as error:
        outcome = {"reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        outcome = {"reason": f"{type(error).__name__}: {error}"}
    aside = room.directory / f"outcome-{side}.new"
    aside.write_text(json.dumps(outcome))
    aside.rename(aside.with_suffix(".json"))


if __name__ == "__main__":
    # As gpu_check.child, so that there is one NotTested.
    from gpu_check.child import main as run

    run(*sys.argv[1:])
