"""Forks base and LoRA work on the fake driver, in a process of its own; prints JSON.

Arguments: a JSON list of pairs, and which work raises: ``base``, ``lora`` or ``nothing``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from horizonserve.lora.parallel import forks
from horizonserve.spatial.driver import Device, DriverError, call


class Streams:
    """In torch's place, which would want a real GPU."""

    def __init__(self) -> None:
        self.here = 0

    def wrap(self, pointer: int) -> int:
        return pointer

    def current(self) -> int:
        return self.here

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        surrounding, self.here = self.here, stream
        try:
            yield
        finally:
            self.here = surrounding


def main(pairs: list[tuple[int, int]], raising: str) -> None:
    streams = Streams()
    log = Path(os.environ["FAKE_LOG"])

    def work(name: str) -> str:
        with log.open("a") as lines:
            lines.write(f"{name}\n")
        ran_on.append(streams.here)
        if name == raising:
            raise KeyError(name)
        return name

    said: dict[str, object] = {}
    ran_on: list[int] = []
    try:
        device = Device()
        made = forks(device, pairs, streams)
        said["made"] = [list(pair) for pair in made]
        said["returned"] = made[pairs[0]].both(lambda: work("base"), lambda: work("lora"))
        # Again, as the next layer does.
        made[pairs[0]].both(lambda: work("base"), lambda: work("lora"))
    except KeyError as error:
        said["raised"], said["notes"] = str(error), getattr(error, "__notes__", [])
    except (DriverError, ValueError) as error:
        said["error"] = str(error)
    said["streams"] = len(set(ran_on))
    said["stream"] = streams.here
    said["context"] = int(call("cuCtxGetCurrent"))
    print(json.dumps(said))


main([(base, lora) for base, lora in json.loads(sys.argv[1])], sys.argv[2])
