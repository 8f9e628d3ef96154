"""The scheduler classes of a vLLM-Omni pipeline's shared stage."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler
from vllm_omni.engine.serialization import deserialize_additional_information

from horizonserve.serving import compat
from horizonserve.serving.pipelines import final_outputs
from horizonserve.serving.queue_view import QueueView


class OmniQueueView(QueueView):
    """``QueueView`` that reads what vLLM-Omni sends along with a request."""

    _needs = compat.SCHEDULER + compat.OMNI_SCHEDULER
    _decode = staticmethod(deserialize_additional_information)
    _final_outputs = staticmethod(final_outputs)


class HorizonARScheduler(OmniARScheduler, OmniQueueView, Scheduler):
    """Synchronous."""


class HorizonARAsyncScheduler(OmniARAsyncScheduler, OmniQueueView, AsyncScheduler):
    """Asynchronous: the next step is scheduled while this one runs."""


def ar_scheduler(*, vllm_config: Any, **kwargs: Any) -> OmniQueueView:
    """Make the scheduler of a pipeline's shared stage, as the stage's final configuration says.

    A sync class under async scheduling would halve the step rate, and whether a stage is async
    is only decided when its configuration is complete.
    """
    asynchronous = vllm_config.scheduler_config.async_scheduling
    cls = HorizonARAsyncScheduler if asynchronous else HorizonARScheduler
    return cls(vllm_config=vllm_config, **kwargs)
