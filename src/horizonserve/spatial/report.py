"""What people are told of a server's spatial control: ``policy show`` and ``doctor``."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from horizonserve.config import Settings
from horizonserve.process import environment, start_ticks
from horizonserve.spatial.driver import Device, DriverError
from horizonserve.spatial.green import conditions
from horizonserve.spatial.monitor import MAX_STAGES, SHARED_STAGE, Monitor, MonitorError, State
from horizonserve.spatial.pressure import STALE_S


def report(described: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """The state of a server's spatial control.

    Args:
        described: what its shared stage said at start; see `horizonserve.serving.hooks`.
        settings: those it runs under.

    Returns:
        ``state`` is ``on``, ``off`` (switched off), ``refused`` (``why`` says the reason) or
        ``not prepared`` (nothing was made for it at start). Where the stages have a record also
        backend, levels, pressure, and level and activity per stage.
    """
    found = dict(described)
    if found.get("state") != "prepared":
        return found
    try:
        monitor = Monitor.attach(found.pop("record"))
    except MonitorError as error:
        return found | {"state": "refused", "why": str(error)}
    why = monitor.vetoed()
    readings = {stage: monitor.read(stage) for stage in range(MAX_STAGES)}
    monitor.close()
    now_s = time.monotonic()
    shared = readings[SHARED_STAGE]
    return found | {
        "state": "refused" if why else "on" if settings.caps else "off",
        "why": why,
        "pressure": None if shared is None else _pressure(shared.state, now_s),
        "stages": {
            str(stage): {
                "pid": seen.pid,
                "alive": start_ticks(seen.pid) == seen.start_ticks,
                "level": None
                if seen.state.applied is None
                else list(seen.levels[seen.state.applied][:2]),
                "last_forward_s_ago": None
                if seen.state.last_forward_s is None
                else round(now_s - seen.state.last_forward_s, 3),
            }
            for stage, seen in readings.items()
            if seen is not None
        },
    }


def _pressure(state: State, now_s: float) -> float | None:
    """The pressure of the last decision, if that is as young as a pressure must be."""
    if state.pressure_at_s is None or now_s - state.pressure_at_s > STALE_S:
        return None
    return state.pressure


def gpu_conditions(pid: int) -> dict[str, str | None]:
    """Each condition of green contexts for a running server, and what is wrong with it.

    Asks the driver in this process, as the server's process ``pid`` would: with its environment.
    """
    try:
        its = environment(pid)
    except OSError as error:
        return {"the server's environment": str(error)}
    # Its MPS daemon and its devices are those that its environment names.
    os.environ.update({k: v for k, v in its.items() if k.startswith(("CUDA_", "NVIDIA_"))})
    found: dict[str, str | None] = {"a GPU with green contexts": None}
    mps = True
    try:
        mps = Device().mps
    except DriverError as error:
        found["a GPU with green contexts"] = str(error)
    return found | conditions(mps, its)
