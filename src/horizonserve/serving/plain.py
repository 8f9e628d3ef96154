"""The scheduler classes of a plain vLLM server: every request is short, promises still differ."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from horizonserve.serving.halo import HaloLender
from horizonserve.serving.lender import Events


class HorizonScheduler(Events, HaloLender, Scheduler):
    """Synchronous."""


class HorizonAsyncScheduler(Events, HaloLender, AsyncScheduler):
    """Asynchronous: the next step is scheduled while this one runs."""


def scheduler(*, vllm_config: Any, **kwargs: Any) -> HaloLender:
    """Make the scheduler that the server's final configuration asks for."""
    asynchronous = vllm_config.scheduler_config.async_scheduling
    cls = HorizonAsyncScheduler if asynchronous else HorizonScheduler
    return cls(vllm_config=vllm_config, **kwargs)
