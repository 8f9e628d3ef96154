"""`horizon-profile slo`: from a model, or a server that runs, to a profile."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console

from horizonserve import facts, instance
from horizonserve.bench.boot import BOOT_GUESS_S
from horizonserve.bench.client import body, send
from horizonserve.bench.display import Display
from horizonserve.bench.live import Live
from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import (
    MODEL_NAME,
    Server,
    ServerError,
    command_line,
    free_port,
    serve,
)
from horizonserve.config import Settings
from horizonserve.profile import Model, Platform, Profile, Versions, kept, place, save
from horizonserve.profiling.fit import profiles
from horizonserve.profiling.plan import Cell, Grid, cells
from horizonserve.profiling.samples import Samples, sweep_of
from horizonserve.profiling.sweep import Effort, ServerGoneError, Sweep
from horizonserve.slo import RequestClass

REQUEST_LIMIT_S: Final = 300.0
_HERE: Final = ("127.0.0.1", "localhost", "::1")
_LOOK_LIMIT: Final = aiohttp.ClientTimeout(total=20)


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """Everything that decides what is measured."""

    classes: tuple[RequestClass, ...] = tuple(RequestClass)
    grid: Grid = field(default_factory=Grid)
    budget_s: float = 1_800.0
    precision: float = 0.25
    slo_multiple: float = 5.0
    seed: int = 1

    @property
    def plan(self) -> list[Cell]:
        """The sizes to measure."""
        return cells(self.grid, self.classes)


@dataclass(frozen=True, slots=True)
class Facts:
    """Where it is measured."""

    kind: str
    platform: Platform
    model: Model
    versions: Versions


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a sweep."""

    profile: Profile
    #: Whether it went to its end; what is missing is in ``why``.
    complete: bool
    why: str = ""


def serve_and_measure(
    model: str,
    deploy: Path | None,
    config: SloConfig,
    out: Path,
    console: Console,
) -> tuple[Path, Outcome]:
    """Start a server of the model, measure, stop it; where the profile is and what came of it.

    Raises:
        ServerError: it did not start.
        SamplesError: ``out`` holds samples of another sweep.
    """
    found: tuple[Path, Outcome] | None = None
    port = free_port()
    argv = command_line(model, deploy, scheduler="horizon", port=port)
    try:
        with contextlib.ExitStack() as stack:
            display = stack.enter_context(Display(console, BOOT_GUESS_S + config.budget_s))
            with display.step("starting the server", BOOT_GUESS_S) as say:
                server = stack.enter_context(
                    serve(argv, port, out / "server.log", notify=lambda _s, line: say(line))
                )
            measuring = _measure(server, MODEL_NAME, config, out, display, Path(model).name)
            found = asyncio.run(measuring)
    except ServerError:
        # It died, and what it answered before is in the profile.
        if found is None:
            raise
    return found


def measure_at(url: str, config: SloConfig, out: Path, console: Console) -> tuple[Path, Outcome]:
    """The same on a server that runs already on this machine and has nothing else to do.

    Raises:
        ServerError: it runs elsewhere, is busy, or does not answer.
    """
    if urlsplit(url).hostname not in _HERE:
        raise ServerError(
            f"{url}: a profile is of the machine that it is made on; give one of {_HERE}"
        )
    with Display(console, config.budget_s) as display:
        server = Server(url.rstrip("/"), out / "server.log", 0)
        return asyncio.run(_measure(server, None, config, out, display, None))


async def _measure(
    server: Server,
    model_name: str | None,
    config: SloConfig,
    out: Path,
    display: Display,
    title: str | None,
) -> tuple[Path, Outcome]:
    async with Live.open(server) as live:
        if (busy := await live.in_flight()) > 0:
            raise ServerError(f"{server.url}: is busy with {busy:.0f} requests; measure it alone")
        served_name = model_name or await _served_name(live)
        own = model_name is not None
        if own:
            # As vLLM-Omni would serve it: a policy may cut the steps of a prompt.
            await live.switch(Settings(scheduler="default"))
        where = _facts(live if own else None, title or served_name)
        path = place(out, where.platform, where.model)
        samples = Samples(
            path.with_suffix(".samples.jsonl"),
            sweep_of(
                config.plan,
                seed=config.seed,
                platform=where.platform.model_dump(),
                model=where.model.model_dump(),
                versions=where.versions.model_dump(),
            ),
        )
        try:
            before = kept(path, where.kind, where.platform, where.model, where.versions)
            outcome = await _sweep(live, served_name, before, config, samples, display)
        finally:
            samples.close()
        if outcome.profile.classes:
            save(outcome.profile, path)
        if outcome.complete:
            samples.path.unlink()
        return path, outcome


async def _sweep(
    live: Live,
    served_name: str,
    before: Profile,
    config: SloConfig,
    samples: Samples,
    display: Display,
) -> Outcome:
    async def ask(cell: Cell, seed: int) -> Result:
        item = cell.item(seed)
        result = await send(
            live.session,
            live.server,
            item,
            index=0,
            scheduled_s=time.monotonic(),
            limit_s=REQUEST_LIMIT_S,
            payload={**body(item), "model": served_name},
        )
        if result.status is Status.FAILED and not await _alive(live):
            raise ServerGoneError(f"{live.server.url} does not answer any more: {result.error}")
        return result

    effort = Effort(time.monotonic() + config.budget_s, config.precision, config.seed)
    sweep = Sweep(config.plan, samples, ask, effort)
    why = []
    with display.step("measuring", config.budget_s) as sweep.say:
        try:
            if not await sweep.run():
                why.append("the budget ended before every interval was narrow enough")
        except ServerGoneError as error:
            why.append(str(error))
    found = profiles(config.plan, samples.taken(), config.slo_multiple)
    failed = sweep.failed
    if not why:
        uncounted = {config.plan[s.cell].request_class for s in samples.taken()} - found.keys()
        failed |= dict.fromkeys(
            uncounted - failed.keys(), "no text answer told how many tokens its prompts have"
        )
    if failed:
        why.append(f"not measured: {', '.join(failed)}")
    if not found:
        why.append("the server took none of the classes" if not why else "nothing is measured yet")
    # What is there is replaced by what is better known only.
    better = {
        name: one
        for name, one in found.items()
        if sweep.done(name)
        or name not in before.classes
        or one.samples > before.classes[name].samples
    }
    update = {
        "date": datetime.date.today(),
        "seed": config.seed,
        "failed": {name: error[:300] for name, error in failed.items()},
    }
    return Outcome(
        before.updated(better, config.slo_multiple).model_copy(update=update),
        complete=not why,
        why="; ".join(why),
    )


def _facts(live: Live | None, name: str) -> Facts:
    """Where the server runs; what its live record does not tell is left out."""
    here = facts.platform()
    known: dict[str, Any] = {}
    if live is not None:
        known = live.record().identity["architecture"]
    elif len(found := list(instance.live())) == 1:
        known = found[0].identity.get("architecture", {})
    return Facts(facts.kind(here), here, Model(name=name, **known), facts.versions())


async def _served_name(live: Live) -> str:
    url = f"{live.server.url}/v1/models"
    try:
        async with live.session.get(url, timeout=_LOOK_LIMIT) as response:
            models = (await response.json())["data"]
            return str(models[0]["id"])
    except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise ServerError(f"{url}: does not name a model ({error!r})") from error


async def _alive(live: Live) -> bool:
    try:
        async with live.session.get(f"{live.server.url}/health", timeout=_LOOK_LIMIT) as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False
