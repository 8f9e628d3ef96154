"""Policies against each other: the same seeded traces, on one running server.

Arms are settings, switched through the live record, so one boot serves them all. For each seed
every arm plays the same trace; the order of the arms rotates from seed to seed, so that a slow
drift of the machine does not favour one. A run starts only when no stage holds a request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from horizonserve.bench.live import Live
from horizonserve.bench.machine import Neighbours
from horizonserve.bench.metrics import Targets
from horizonserve.bench.play import Bounds, http_send, play
from horizonserve.bench.result import Result
from horizonserve.bench.store import Run, Store
from horizonserve.config import Settings
from horizonserve.workload import Mix, make_trace

#: How long a run drains, and the server then stays busy; for the display only.
DRAIN_GUESS_S: Final = 30.0
SETTLE_GUESS_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Arm:
    """A named set of changes to the base settings."""

    name: str
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Experiment:
    """Arms x seeds at one arrival rate."""

    name: str
    mix: Mix
    rate_rps: float
    duration_s: float
    seeds: tuple[int, ...]
    arms: tuple[Arm, ...]
    bounds: Bounds = field(default_factory=Bounds)

    def runs(self) -> Iterator[tuple[int, Arm]]:
        """Seed by seed, the arms in rotated order."""
        for turn, seed in enumerate(self.seeds):
            shift = turn % len(self.arms)
            for arm in (*self.arms[shift:], *self.arms[:shift]):
                yield seed, arm

    def run_name(self, seed: int, arm: Arm) -> str:
        """The name of a run in the store."""
        return f"{self.name}/{arm.name}-seed{seed}"

    def head(self, seed: int, arm: Arm, targets: Targets) -> dict[str, Any]:
        """What makes this run what it is; a stored run with another head is another run."""
        return {
            "experiment": self.name,
            "arm": arm.name,
            "changes": dict(arm.changes),
            "seed": seed,
            "rate_rps": self.rate_rps,
            "duration_s": self.duration_s,
            "mix": self.mix.to_json(),
            "bounds": asdict(self.bounds),
            "slo_ms": {name.value: round(s * 1_000, 1) for name, s in targets.slo_s.items()},
            "tbt_ms": None if targets.tbt_s is None else round(targets.tbt_s * 1_000, 1),
        }

    @property
    def run_guess_s(self) -> float:
        """How long a run may take, drain included; for the display only."""
        return self.duration_s + min(DRAIN_GUESS_S, self.bounds.drain_s) + SETTLE_GUESS_S


class Watch:
    """What the driver tells a display; this one shows nothing."""

    @contextlib.contextmanager
    def step(self, _name: str, _guess_s: float) -> Iterator[Callable[[str], None]]:
        """A step that may take so long; the callable shows a few words about it."""
        yield lambda _text: None

    def skip(self, _guess_s: float) -> None:
        """A step that was already done."""


async def compare(
    live: Live,
    store: Store,
    experiment: Experiment,
    base: Settings,
    targets: Targets,
    watch: Watch,
    before_run: Callable[[Experiment], None] = lambda _experiment: None,
    during_run: Callable[[str], AbstractContextManager[object]] = lambda _name: nullcontext(),
    only_seed: int | None = None,
) -> list[Run]:
    """Play what is not yet in the store; all the runs of the experiment.

    ``before_run`` may stop the experiment between two runs by raising; the context that
    ``during_run`` makes of a run's name is around each run. With ``only_seed`` the runs of other
    seeds are left for another call.

    Raises:
        StoreError: the store holds runs of a different experiment under these names.
        LiveError: the server does not switch or does not become idle.
    """
    for seed, arm in experiment.runs():
        if only_seed not in (None, seed):
            continue
        name = experiment.run_name(seed, arm)
        head = experiment.head(seed, arm, targets)
        if store.done(name, head):
            watch.skip(experiment.run_guess_s)
            continue
        before_run(experiment)
        with watch.step(name, experiment.run_guess_s) as say:
            say("waiting for the server to be idle")
            await live.idle()
            await live.switch(base.changed(arm.changes))
            with during_run(name):
                await run_once(live, store, experiment, name, head, targets, say)
    return stored_runs(store, experiment)


async def run_once(
    live: Live,
    store: Store,
    experiment: Experiment,
    name: str,
    head: Mapping[str, Any],
    targets: Targets,
    say: Callable[[str], None],
) -> None:
    """Play one trace and store what came of it."""
    trace = make_trace(
        experiment.mix, experiment.rate_rps, experiment.duration_s, int(head["seed"])
    )
    send_one = http_send(live.session, live.server, trace, experiment.bounds)
    neighbours = Neighbours(live.server.owns)
    end: dict[str, Any] = {}
    latest_s = 0.0
    with store.writing(name, head, end) as writer:

        def on_result(result: Result) -> None:
            nonlocal latest_s
            latest_s = max(latest_s, result.late_s)
            writer.result(result)

        neighbours.start()
        start_s = time.monotonic()
        await play(
            trace,
            send_one,
            targets.slo_s,
            bounds=experiment.bounds,
            on_result=on_result,
            progress=lambda sent, ended: say(f"{sent}/{len(trace.items)} sent, {ended} ended"),
        )
        end["took_s"] = round(time.monotonic() - start_s, 2)
        end["settings"] = live.record().settings.model_dump(mode="json", exclude_unset=True)
        end["late_max_s"] = round(latest_s, 4)
        end["other_cores"] = neighbours.cores()


def stored_runs(store: Store, experiment: Experiment) -> list[Run]:
    """The runs of an experiment that are in the store."""
    names = [experiment.run_name(seed, arm) for seed, arm in experiment.runs()]
    return [store.load(name) for name in names if store.path(name).exists()]
