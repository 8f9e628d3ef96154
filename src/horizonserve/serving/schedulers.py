"""The scheduler classes of a vLLM-Omni pipeline's shared stage."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler

from horizonserve.serving import compat
from horizonserve.serving.halo import HaloLender
from horizonserve.serving.lender import Events
from horizonserve.serving.pipelines import final_outputs


def route(request: Any) -> tuple[int, bool]:
    """The stage that answers, and whether the request is there to hand its KV cache on.

    Only these two entries of the payload are read: to decode it all would copy the tensors that
    may travel with a request.
    """
    payload = getattr(request, "additional_information", None)
    if not payload:
        return 0, False
    if isinstance(payload, dict):  # a session that goes on
        return payload.get("omni_final_stage_id", 0), bool(payload.get("omni_force_kv_transfer"))
    entries = payload.entries
    final_stage = entries.get("omni_final_stage_id")
    forced = entries.get("omni_force_kv_transfer")
    return final_stage.scalar_data if final_stage else 0, bool(forced and forced.scalar_data)


class OmniLender(HaloLender):
    """``HaloLender`` that reads what vLLM-Omni sends along with a request."""

    _needs = HaloLender._needs + compat.OMNI_SCHEDULER
    _route = staticmethod(route)
    _final_outputs = staticmethod(final_outputs)


class HorizonARScheduler(Events, OmniARScheduler, OmniLender, Scheduler):
    """Synchronous."""


class HorizonARAsyncScheduler(Events, OmniARAsyncScheduler, OmniLender, AsyncScheduler):
    """Asynchronous: the next step is scheduled while this one runs."""


def ar_scheduler(*, vllm_config: Any, **kwargs: Any) -> OmniLender:
    """Make the scheduler of a pipeline's shared stage, as the stage's final configuration says.

    A sync class under async scheduling would halve the step rate, and whether a stage is async
    is only decided when its configuration is complete.
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    cls = HorizonARAsyncScheduler if asynchronous else HorizonARScheduler
    return cls(vllm_config=vllm_config, **kwargs)
