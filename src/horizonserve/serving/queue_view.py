"""A temporary view of the waiting queues around vLLM's scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

import horizonserve
from horizonserve import services
from horizonserve.config import Settings, load
from horizonserve.instance import Counters, Record
from horizonserve.policy.edf import earliest_deadline_first
from horizonserve.policy.estimate import Estimator
from horizonserve.policy.slack import Ticket
from horizonserve.policy.view import Rules, TemporalPolicy, View
from horizonserve.services import Services
from horizonserve.serving import compat, hooks, profiles
from horizonserve.serving.admission import Admission, estimates_s
from horizonserve.serving.queues import FreshRequests, is_fresh, put_back
from horizonserve.slo import Output, Path, RequestClass

logger = init_logger(f"vllm.{__name__}")


class QueueView(Scheduler):
    """Shows vLLM's scheduler, for one step, the waiting requests that the policy wants it to see.

    - Only fresh requests are ever hidden or reordered. Running, preempted, partly computed and
      blocked requests and streaming sessions are seen as they are, and first.
    - The queue objects stay. For the step, ``waiting`` and ``skipped_waiting`` are views; what the
      step took then leaves the queue, what it preempted goes to its front, and all else keeps its
      place, also when the step raises.
    - A step without a free slot admits nothing, so it is the stock step.
    - Policy ``default`` is the stock scheduler, step for step.
    - Slots and token budget are vLLM's own limits, lowered. Nothing that runs is ever evicted.

    In the method order it stands between OmniAR's housekeeping (abort sweep, pending inputs) and
    vLLM's ``schedule``, so that it filters what the stock loop sees and nothing else.
    """

    waiting: Any
    skipped_waiting: Any
    max_num_running_reqs: int
    prefill_capacity_bound: bool
    #: OmniAR's requests that have left, but whose KV blocks the next stage has yet to fetch.
    waiting_for_transfer_free: Collection[str] = ()

    # vLLM-Omni's own tests make schedulers without __init__; those stay stock.
    _admission: Admission | None = None
    _hidden = 0
    _clock: Callable[[], float] = staticmethod(time.monotonic)

    # What only a vLLM-Omni stage has: see schedulers.py. Plain vLLM must not import vLLM-Omni,
    # which patches it.
    _needs: tuple[compat.Name, ...] = compat.SCHEDULER
    _route: Callable[[Any], tuple[int, bool]] = staticmethod(lambda _: (0, False))
    _final_outputs: Callable[[Any], Mapping[int, Output]] = staticmethod(lambda _: {})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        compat.require(self._needs)
        super().__init__(*args, **kwargs)
        settings, sources = load((self.vllm_config.additional_config or {}).get("horizon"))
        model_config = self.vllm_config.model_config
        stage = getattr(model_config, "stage_id", 0)
        self._max_slots: int = self.max_num_running_reqs
        self._max_tokens: int = self.max_num_scheduled_tokens
        # A stage that cannot split a prompt would wait for ever for a step large enough.
        splits = (
            self.scheduler_config.enable_chunked_prefill
            and not self.scheduler_config.disable_chunked_mm_input
            and not self.need_mamba_block_aligned_split
        )
        self._min_tokens: int = 1 if splits else self._max_tokens
        self._view = View([], 0, 0, 0)
        self._steps = self._full_steps = self._hiding_steps = 0
        self._lent = self._advanced = 0
        self._admitted = self._admitted_long = 0
        # A request that the stock loop may pass over must not be the last one it sees.
        self._passes_over = (
            self.lora_config is not None
            or self.connector is not None
            or self.ec_connector is not None
            or self.policy is not SchedulingPolicy.FCFS
        )
        self._estimator = Estimator(
            estimates_s(settings), profiles.curves(settings, self.vllm_config)
        )
        self._services = services.load(settings.services) if settings.services else Services()
        self._admission = Admission(
            settings,
            self._final_outputs(model_config),
            self._route,
            self._estimator,
            lambda: self._clock(),
            self._alone_s,
            self._answer_tokens,
            self._services,
        )
        admission = self._admission
        self._fresh = FreshRequests(lambda request: admission.admit(request, self.requests))
        self._use(settings)
        self._record = Record(
            settings,
            {
                "version": horizonserve.__version__,
                "model": str(model_config.model)[-128:],
                "architecture": profiles.model(self.vllm_config).model_dump(exclude={"name"}),
                "stage": stage,
                "max_slots": self._max_slots,
                "min_token_budget": self._min_tokens,
                "max_token_budget": self._max_tokens,
                "spatial": hooks.describe(),
            },
        )
        logger.info(
            "HorizonServe %s: policy %s, stage %s, %s slots, first-response SLOs %s",
            horizonserve.__version__,
            settings.scheduler,
            stage,
            self._slots,
            describe_slos(settings, sources),
        )
        if settings.scheduler != "default" and self._max_slots < 2:
            logger.warning(
                "HorizonServe: stage %s has max_num_seqs=%s; requests then wait for its slot and"
                " no order can help them. Set max_num_seqs to 4 or more in the deploy file.",
                stage,
                self._max_slots,
            )

    def _alone_s(self) -> float:
        """Time per token of a request that is alone; 0 while it is unknown."""
        return 0.0

    def _answer_tokens(self, _request_class: RequestClass, at_most: int) -> int:
        """How long an answer of the class is expected to be."""
        return at_most

    def _use(self, settings: Settings) -> None:
        """Run under these settings from this step on."""
        assert self._admission is not None
        self._settings = settings
        self._admission.use(settings)
        if hooks.shared is not None:
            hooks.shared.use(settings)
        self._slots = min(settings.slots or self._max_slots, self._max_slots)
        wanted = settings.token_budget or self._max_tokens
        self.max_num_scheduled_tokens = min(max(wanted, self._min_tokens), self._max_tokens)
        cap = settings.long_cap_requests or max(1, self._slots // 2)
        self._temporal = TemporalPolicy(
            Rules(
                rotation=settings.rotates,
                slack_guard=settings.guards,
                u_guard=settings.u_guard,
                u_lost=settings.u_lost if settings.lost == "demote" else None,
                long_cap=cap if settings.caps_long else None,
                max_hide_s=settings.max_hide_s,
            )
        )

    def add_request(self, request: Any) -> None:
        if self._admission is not None and request.request_id not in self.requests:
            ticket = self._admission.admit(request, self.requests)
            if ticket.path is Path.SHORT:
                self._temporal.saw_short(self._clock())
            self._fresh.add(request)
        super().add_request(request)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        if self._admission is None:
            return super().schedule(throttle_prefills)
        if (settings := self._record.poll()) is not None:
            logger.info("HorizonServe: policy %s from this step on", settings.scheduler)
            self._use(settings)
        stock_slots = self.max_num_running_reqs
        occupied = len(self.running) + self.num_waiting_for_streaming_input
        # After the bound was lowered under load, those that run finish first.
        usable = min(stock_slots, max(self._slots, occupied))
        self.max_num_running_reqs = usable
        try:
            if self._settings.scheduler == "default":
                self._fresh.forget()
                return super().schedule(throttle_prefills)
            return self._schedule_policy(throttle_prefills, usable - occupied)
        finally:
            self.max_num_running_reqs = stock_slots
            self._steps += 1
            self._full_steps += usable <= occupied and bool(self.waiting)
            self._publish()

    def _schedule_policy(self, throttle_prefills: bool, free: int) -> Any:
        """One step under a policy, with so many slots free."""
        if free <= 0 or not (self.waiting or self.skipped_waiting):
            return super().schedule(throttle_prefills)
        return self._schedule_view(throttle_prefills, self._choose(free))

    def _schedule_view(self, throttle_prefills: bool, shown: list[Any]) -> Any:
        """One stock step behind the policy's view of the waiting requests."""
        waiting, skipped = self.waiting, self.skipped_waiting
        view = create_request_queue(self.policy)
        skipped_view = skipped
        if skipped:
            # The stock loop serves it before ``waiting``, so it needs a view too.
            chosen, parked = set(shown), set(skipped)
            shown = [request for request in shown if request not in parked]
            skipped_view = create_request_queue(self.policy)
            for request in skipped:
                if request in chosen:
                    skipped_view.add_request(request)
        for request in shown:
            view.add_request(request)
        before, skipped_before = list(view), list(skipped_view)
        self._hidden = len(waiting) - len(before) + len(skipped) - len(skipped_before)
        self.waiting, self.skipped_waiting = view, skipped_view
        gone: set[Any] | None = set()
        try:
            output = super().schedule(throttle_prefills)
            gone = None
            # vLLM asks the queue whether work is left over; the hidden is.
            self.prefill_capacity_bound |= self._hidden > 0
            return output
        finally:
            if gone is not None:
                gone = {*self.running, *self.skipped_waiting}
            take_out = partial(self._fresh.remove, waiting)
            left = put_back(waiting, before, self.waiting, gone, take_out)
            if skipped_view is not skipped:
                take_out = skipped.remove_requests
                left += put_back(skipped, skipped_before, self.skipped_waiting, gone, take_out)
            self.waiting, self.skipped_waiting = waiting, skipped
            self._hidden = 0
            self._follow(left)

    def _follow(self, left: list[Any]) -> None:
        """Account for the requests that a step took out of the queues."""
        if not left:
            return
        for request in left:
            if request.status is RequestStatus.RUNNING:
                ticket = request.horizonserve_ticket
                if not ticket.started:
                    self._start(ticket)
                self._temporal.entered(ticket.path)
                self._admitted += 1
                self._admitted_long += ticket.path is Path.LONG
        self._fresh.took(left)

    def _start(self, ticket: Ticket) -> None:
        """A group is in its first step."""
        ticket.started, ticket.entered_s = True, self._clock()

    def _choose(self, free: int) -> list[Any]:
        """The visible requests of ``waiting`` and ``skipped_waiting``."""
        fresh = self._fresh
        fresh.sync(self.waiting, self.skipped_waiting, self.running)
        parked = (request for request in self.skipped_waiting if not is_fresh(request))
        limit = len(fresh.groups) if self._passes_over or self.skipped_waiting else free
        return [*fresh.ahead, *parked, *fresh.of(self._order(limit))]

    def _order(self, limit: int) -> list[Ticket]:
        """The groups that may enter, first to last."""
        fresh = self._fresh
        if self._settings.scheduler == "edf":
            return earliest_deadline_first(fresh.groups, limit)
        self._view = self._temporal.view(
            fresh.groups,
            self._clock(),
            limit=limit,
            long_in_stage=self._long_groups(),
            busy=bool(self.running or fresh.ahead),
        )
        self._hiding_steps += self._view.hidden > 0
        return self._view.order

    def _long_groups(self) -> int:
        """Long groups that hold a place in this stage: running, preempted, or being handed on."""
        tickets = {request.horizonserve_ticket for request in self.running}
        tickets.update(request.horizonserve_ticket for request in self._fresh.ahead)
        for request_id in self.waiting_for_transfer_free:
            if (request := self.requests.get(request_id)) is not None:
                tickets.add(request.horizonserve_ticket)
        return [ticket.path for ticket in tickets].count(Path.LONG)

    def _publish(self) -> None:
        self._record.publish(
            Counters(
                self._steps,
                self._full_steps,
                self._hiding_steps,
                self._admitted,
                self._admitted_long,
                self._lent,
                len(self.waiting) + len(self.skipped_waiting),
                len(self.running),
                self._advanced,
                self._view.protected,
                self._view.lost,
            )
        )

    def get_num_unfinished_requests(self) -> int:
        # Another thread may ask while a step runs behind a view.
        return int(super().get_num_unfinished_requests()) + self._hidden

    def get_request_counts(self) -> tuple[int, int]:
        running, waiting = super().get_request_counts()
        return running, waiting + self._hidden

    def shutdown(self) -> None:
        if self._admission is not None:
            self._record.close()
        super().shutdown()


def describe_slos(settings: Settings, sources: dict[str, str]) -> str:
    """The SLO of every class and where it came from, for one log line."""
    parts = []
    for request_class in RequestClass:
        field = settings.slo_field(request_class)
        source = f"{field} from {sources[field]}" if field else "built-in default"
        parts.append(f"{request_class} {settings.slo_ms(request_class):g} ms ({source})")
    return ", ".join(parts)
