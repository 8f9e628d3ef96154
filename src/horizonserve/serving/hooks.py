"""Where the spatial loop meets vLLM: the record at launch, and the workers of each stage.

A worker is reached through the wrapper that makes it, so that every worker class is, a user's own
included: its ``execute_model`` and ``sample_tokens`` then run inside the loop of its stage.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any, Final

from horizonserve.config import Settings, load
from horizonserve.serving import compat
from horizonserve.serving.backends import before, make_backend
from horizonserve.spatial.green import refusals
from horizonserve.spatial.ladder import Side
from horizonserve.spatial.monitor import (
    PREFIX,
    SHARED_STAGE,
    VARIABLE,
    Monitor,
    MonitorError,
    sweep,
)
from horizonserve.spatial.pressure import Sampler
from horizonserve.spatial.stage import DownstreamStage, SharedStage, Stage

logger = logging.getLogger(f"vllm.{__name__}")

_DIFFUSION_FORWARDS: Final = ("execute_model", "execute_model_batch", "execute_stepwise")

#: Of a reason in what a stage says of itself, which has little room.
_WHY_BYTES: Final = 200

#: The shared stage of this process, for its scheduler; and what people are told of it.
shared: SharedStage | None = None
described: dict[str, Any] = {"state": "not prepared"}


def prepare(settings: Settings) -> None:
    """Make the record that the stage processes of this server meet at, in the launching process.

    Without it they run uncapped. Where spatial control is asked for but cannot be, says why, once.
    """
    sweep()  # also where this server needs none: a dead one may have left its own
    # Also for the children: that there is none is then decided, and why.
    os.environ[VARIABLE] = "spatial control was not asked for at the start"
    if not settings.caps:
        return
    from vllm.platforms import current_platform

    if settings.spatial_backend == "auto" and not current_platform.is_cuda():
        why = "no CUDA device; HORIZON_SPATIAL_BACKEND=cores caps CPU cores in its place"
        os.environ[VARIABLE] = why
        logger.info("HorizonServe: no spatial control: %s", why)
        return
    reasons = refusals(True) if settings.spatial_backend in ("auto", "green") else []
    try:
        if not reasons:
            Monitor.create()
    except OSError as error:
        reasons = [f"/dev/shm cannot be written ({error})"]
    if reasons:
        os.environ[VARIABLE] = "; ".join(reasons)
        _say_refused(os.environ[VARIABLE])


def _refused(why: str) -> None:
    """This process's stage is not capped: for those who ask, and once in the log."""
    global described
    described = {"state": "refused", "why": why}
    _say_refused(why)


def _say_refused(reason: str) -> None:
    logger.warning("HorizonServe: no spatial control, temporal goes on: %s", reason)


def install() -> None:
    """Have the workers that this process will make run inside the loop of their stage."""
    global described
    name = os.environ.get(VARIABLE, "")
    if not name.startswith(PREFIX):
        described = {"state": "not prepared", "why": name[:_WHY_BYTES]}
        return
    # A stage's own process has the first; a worker that is in another one, the second.
    if {"vllm.v1.engine.core", "vllm.v1.worker.worker_base"} & sys.modules.keys():
        compat.require(compat.WORKER)
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        _after(WorkerWrapperBase, "init_device", _attach_llm)
    if {
        "vllm_omni.diffusion.stage_diffusion_proc",
        "vllm_omni.diffusion.worker.diffusion_worker",
    } & sys.modules.keys():
        compat.require(compat.DIFFUSION_WORKER)
        from vllm_omni.diffusion.worker.diffusion_worker import WorkerWrapperBase as Diffusion

        _after(Diffusion, "__init__", _attach_diffusion)


def describe() -> dict[str, Any]:
    """What people are told of this process's shared stage, once its worker has been made."""
    if described["state"] == "not prepared" and os.environ.get(VARIABLE, "").startswith(PREFIX):
        why = "stage 0: its worker is in another process than its scheduler, out of reach"
        try:
            monitor = Monitor.attach()
            monitor.veto(why)  # unless the worker has given a reason itself
            why = monitor.vetoed() or why
            monitor.close()
        except MonitorError as error:
            why = str(error)
        _refused(why)
    return described


def _after(cls: type, method: str, attach: Callable[[Any], None]) -> None:
    """Call ``attach`` with the worker of each wrapper whose ``method`` has returned."""
    stock = getattr(cls, method)
    if hasattr(stock, "__wrapped__") and stock.__module__ == __name__:
        return

    @functools.wraps(stock)
    def then_attach(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        attach(self.worker)
        return result

    then_attach.__module__ = __name__
    setattr(cls, method, then_attach)


def _attach_llm(worker: Any) -> None:
    config = worker.vllm_config
    index = int(getattr(config.model_config, "stage_id", 0))

    def refusal(backend: str, settings: Settings) -> str | None:
        return _llm_refusal(config, index, backend, settings.graphs_per_level)

    stage = _attach(worker, index, refusal, graphs=not config.model_config.enforce_eager)
    if stage is None:
        return
    execute_model, sample_tokens = worker.execute_model, worker.sample_tokens

    def execute_capped(scheduler_output: Any) -> Any:
        with stage.forward(scheduler_output.total_num_scheduled_tokens > 0):
            return execute_model(scheduler_output)

    def sample_capped(grammar_output: Any) -> Any:
        with stage.again():
            return sample_tokens(grammar_output)

    worker.execute_model, worker.sample_tokens = execute_capped, sample_capped
    if described["backend"] == "green":
        _profile_each_level(worker.model_runner, stage)


def _attach_diffusion(worker: Any) -> None:
    gpus = worker.od_config.num_gpus or 1
    why = None if gpus == 1 else f"it uses {gpus} GPUs, not one"
    stage = _attach(worker, int(worker.stage_id), lambda _backend, _settings: why)
    if stage is None:
        return
    for name in _DIFFUSION_FORWARDS:
        setattr(worker, name, _capped(stage, getattr(worker, name)))


def _capped(stage: Stage, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def capped(*args: Any, **kwargs: Any) -> Any:
        with stage.forward():
            return stock(*args, **kwargs)

    return capped


def _profile_each_level(runner: Any, stage: Stage) -> None:
    """Have vLLM size its KV cache after every level has its workspaces, which it keeps."""
    stock = runner.profile_run

    def profile_run() -> None:
        # The whole first: what is compiled or tuned at the first forward is for all SMs.
        for level in reversed(stage.levels):
            with stage.backend.activate(level):
                stock()

    runner.profile_run = profile_run


def _llm_refusal(config: Any, index: int, backend: str, graphs_per_level: bool) -> str | None:
    """Why an LLM stage cannot be capped; None if it can."""
    parallel = config.parallel_config
    ranks = parallel.world_size * parallel.data_parallel_size
    if ranks != 1:
        return f"its workers are {ranks} processes, not one on one GPU"
    executor = parallel.distributed_executor_backend
    if executor == "ray":
        return "Ray places its worker; start it without Ray"
    if index == SHARED_STAGE and executor not in (None, "uni"):
        return (
            f"distributed_executor_backend={executor!r} puts its worker into another process than"
            " its scheduler; leave it out"
        )
    if backend == "green" and not config.model_config.enforce_eager:
        compat.require(compat.GRAPHS)
        from horizonserve.serving import graphs

        return graphs.refusal(config, graphs_per_level)
    return None


def _attach(
    worker: Any,
    index: int,
    refusal: Callable[[str, Settings], str | None],
    graphs: bool = False,
) -> Stage | None:
    """Make the loop of this process's stage; None where it is not to be capped.

    ``refusal`` says why a backend cannot cap this stage, None if it can; ``graphs`` whether vLLM
    captures graphs for it.
    """
    global described
    try:
        monitor = Monitor.attach()
    except MonitorError as error:
        _refused(str(error))
        return None
    if (why := monitor.vetoed()) is not None:  # loudly, but once
        described = {"state": "refused", "why": why}
        monitor.close()
        return None
    settings, _ = load()
    backend = settings.spatial_backend
    if backend == "auto":
        backend = "green"
    try:
        if (why := refusal(backend, settings)) is not None:
            raise ValueError(why)
        stage, close = _stage(worker, index, backend, settings, monitor, graphs)
    # Whatever it was, the stage serves without. Also for a second process of one stage.
    except (RuntimeError, ValueError, OSError) as error:
        reason = f"stage {index}: {error}"[:_WHY_BYTES]
        monitor.veto(reason)
        monitor.close()
        _refused(reason)
        return None
    before(worker, "shutdown", close)
    levels = [[level.shared_sms, level.downstream_sms] for level in stage.levels]
    described = {
        "state": "prepared",
        "record": monitor.path.name,
        "backend": backend,
        "levels": levels,
    }
    logger.info("HorizonServe: stage %s has SM levels %s (%s)", index, levels, backend)
    return stage


def _stage(
    worker: Any, index: int, backend: str, settings: Settings, monitor: Monitor, graphs: bool
) -> tuple[Stage, Callable[[], None]]:
    """The loop of the stage, and what ends it."""
    global shared
    side = Side.SHARED if index == SHARED_STAGE else Side.DOWNSTREAM
    caps, source = make_backend(worker, side, backend, settings, graphs)
    if side is Side.DOWNSTREAM:
        stage = DownstreamStage(index, caps, monitor)
        return stage, stage.close
    sampler = Sampler(source)
    shared = leader = SharedStage(caps, monitor, sampler.pressure, settings)
    sampler.start()

    def close() -> None:
        sampler.close()
        leader.close()

    return leader, close
