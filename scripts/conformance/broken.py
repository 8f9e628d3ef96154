"""Schedulers that are wrong on purpose: each must be caught, or the invariants check nothing."""

# vLLM is untyped from here.
# mypy: disable-error-code="misc"

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.request_queue import create_request_queue
from vllm_omni.core.sched.omni_ar_scheduler import OmniARScheduler


class LosesRequest(OmniARScheduler):
    """A stash that is not restored completely."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if self.waiting:
            self.waiting.remove_requests([list(self.waiting)[-1]])
        return output


class ReplacesQueue(OmniARScheduler):
    """The same requests, in another queue object."""

    waiting: Any

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        requests, self.waiting = list(self.waiting), create_request_queue(self.policy)
        for request in requests:
            self.waiting.add_request(request)
        return output


class QueuesTwice(OmniARScheduler):
    def add_request(self, request: Any) -> None:
        super().add_request(request)
        self.waiting.add_request(request)


class LeaksBlocks(OmniARScheduler):
    def _free_request_blocks(self, request: Any) -> None:
        self.kv_cache_manager.pop_blocks_for_free(request)


class SurvivesAbort(OmniARScheduler):
    """An abort that does not look into the stash."""

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        waiting = {r.request_id for r in self.waiting}
        if request_ids is None:
            request_ids = [i for i in self.requests if i not in waiting]
        return super().finish_requests(request_ids, finished_status)


class Raises(OmniARScheduler):
    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        if len(self.waiting) > 1:
            raise LookupError("on purpose")
        return super().schedule(*args, **kwargs)
