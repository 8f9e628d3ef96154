"""The server of a fixed-cap sweep, and where its result goes."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

from horizonserve import facts
from horizonserve.bench.boot import BOOT_GUESS_S
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live, LiveError
from horizonserve.bench.server import Server, ServerError, command_line, free_port, serve
from horizonserve.profile import Model, Profile, kept, place, save
from horizonserve.profiling.figures import plot
from horizonserve.profiling.sm import Levels, Measured, SmConfig, choose, sweep
from horizonserve.spatial.driver import levels_here
from horizonserve.spatial.ladder import choose as choose_levels

#: Everything that a ladder can hold; the sweep chooses within it.
_WIDEST: Final = {"HORIZON_SPATIAL": "on", "HORIZON_S_MIN_SMS": "1"}


def planned_levels(backend: str) -> Levels:
    """The levels that a server on this machine would have.

    Raises:
        RuntimeError: there is no GPU, or it has no green contexts.
    """
    die, levels = levels_here(backend)
    chosen = choose_levels(die, levels, 1, max(1, die.total_sms - 1))
    return [(level.shared_sms, level.downstream_sms) for level in chosen]


def serve_and_sweep(
    model: str,
    deploy: Path | None,
    backend: str,
    config: SmConfig,
    out: Path,
    console: Console,
) -> tuple[Path, Profile, str]:
    """Start a server whose ladder spans the device, sweep, add it to the profile and plot it.

    Returns where the profile is, the profile with what was measured, and why it is not complete,
    empty if it is. What is not complete replaces nothing.

    Raises:
        ServerError: it did not start.
        LiveError: it cannot be capped, or nothing was measured.
    """
    most = max((shared for shared, beside in planned_levels(backend) if beside), default=None)
    if most is None:
        raise LiveError(f"{backend}: no level leaves the stages downstream anything")
    env = {**_WIDEST, "HORIZON_SPATIAL_BACKEND": backend, "HORIZON_S_CAP_SMS": str(most)}
    port = free_port()
    argv = command_line(model, deploy, scheduler="horizon", port=port)
    swept: _Swept | None = None
    try:
        with contextlib.ExitStack() as stack:
            display = stack.enter_context(Display(console, BOOT_GUESS_S + config.budget_s))
            with display.step("starting the server", BOOT_GUESS_S) as say:
                server = stack.enter_context(
                    serve(argv, port, out / "server.log", env=env, notify=lambda _s, x: say(x))
                )
            with display.step("sweeping", config.budget_s) as say:
                swept = asyncio.run(_sweep(server, config, say))
    except ServerError:
        # It died, and what it answered before counts.
        if swept is None:
            raise
    if not any(one.tpot_s for one in swept.measured.values()):
        raise LiveError(swept.why)
    platform = facts.platform()
    of_model = Model(name=Path(model).name, **swept.architecture)
    path = place(out, platform, of_model)
    profile = kept(path, facts.kind(platform), platform, of_model, facts.versions())
    sms = choose(swept.levels, swept.measured, config, backend)
    kept_sms = profile.sms
    profile = profile.model_copy(update={"sms": sms, "date": datetime.date.today()})
    if kept_sms is None or not swept.why:
        save(profile, path)
        whole = swept.measured[swept.levels[-1][0]].shorts
        plot(sms, whole, profile.kind, path.with_suffix(".sms.png"))
    return path, profile, swept.why


class _Swept(NamedTuple):
    levels: Levels
    architecture: dict[str, Any]
    measured: dict[int, Measured]
    why: str


async def _sweep(server: Server, config: SmConfig, say: Callable[[str], None]) -> _Swept:
    async with Live.open(server) as live:
        identity = live.record().identity
        spatial = identity["spatial"]
        if "levels" not in spatial:
            raise LiveError(
                f"the server cannot be capped: {spatial.get('why', spatial['state'])}; see"
                " `horizonserve doctor`"
            )
        levels = [(shared, downstream) for shared, downstream in spatial["levels"]]
        measured, why = await sweep(live, levels, config, say)
        return _Swept(levels, identity["architecture"], measured, why)
