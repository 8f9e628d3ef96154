"""Drives a GreenBackend on the fake driver, in a process of its own; prints JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

from horizonserve.spatial.driver import Device, DriverError, bindings, call
from horizonserve.spatial.green import GreenBackend
from horizonserve.spatial.ladder import Side, choose


class Streams:
    def __init__(self) -> None:
        self.current = 0

    def wrap(self, pointer: int) -> int:
        return pointer

    @contextmanager
    def use(self, stream: int) -> Iterator[int]:
        surrounding, self.current = self.current, stream
        try:
            yield surrounding
        finally:
            self.current = surrounding


def meet(side: str, point: str) -> None:
    """Wait here for the process of the other side, if there is one."""
    directory = os.environ.get("FAKE_MEET")
    if directory:
        (Path(directory) / f"{point}-{side}").touch()
        until_s = time.monotonic() + 30
        while len(list(Path(directory).glob(f"{point}-*"))) < 2:
            assert time.monotonic() < until_s, f"alone at {point}"
            time.sleep(0.001)


def main(side: str) -> None:
    streams = Streams()
    said: dict[str, object] = {"bindings": version("cuda-bindings"), "file": bindings().__file__}
    try:
        device = Device()
        said["die"] = [device.die.total_sms, device.die.minimum_sms, device.die.alignment_sms]
        said["structured"] = device.structured
        meet(side, "build")
        found = device.levels()
        said["existing"] = [x.shared_sms for x in found]
        levels = choose(device.die, found)
        backend = GreenBackend(device, levels, Side(side), streams)
        said["levels"] = [[x.shared_sms, x.downstream_sms] for x in backend.levels]
        said["fingerprints"] = [x.fingerprint for x in backend.levels]
        mine = []
        for rung in filter(None, backend._rungs.values()):
            resource = call("cuGreenCtxGetDevResource", rung.context, device.sm_type)
            # The fake keeps tag, first and end of its SM range in the opaque bytes.
            opaque = bytes(resource._internal_padding)
            mine.append([int.from_bytes(opaque[at : at + 4], "little") for at in (4, 8)])
        said["ranges"] = mine
        meet(side, "built")
        for level in levels:
            with backend.activate(level):
                assert bool(streams.current) != level.whole
        try:
            with backend.activate(levels[0]):
                raise KeyError("forward")
        except KeyError as error:
            said["raised"] = str(error)
            said["notes"] = getattr(error, "__notes__", [])
    except DriverError as error:
        said["error"] = str(error)
        said["code"] = error.code
        said["notes"] = getattr(error, "__notes__", [])
    said["stream"] = streams.current
    try:
        said["context"] = int(call("cuCtxGetCurrent"))
    except DriverError as error:
        said["context"] = str(error)
    print(json.dumps(said))


main(sys.argv[1])
