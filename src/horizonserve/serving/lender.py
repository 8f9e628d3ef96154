"""Steps that some of the running requests sit out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from horizonserve.config import Settings
from horizonserve.policy.batch import StepModel
from horizonserve.policy.lending import Job, Lending, Limits, Plan
from horizonserve.policy.lengths import Lengths
from horizonserve.policy.slack import Ticket
from horizonserve.serving import compat, hooks
from horizonserve.serving.answers import Answers, Awaited
from horizonserve.serving.queue_view import QueueView
from horizonserve.serving.queues import is_fresh
from horizonserve.serving.step_log import StepLog, answer, entry
from horizonserve.serving.steps import (
    StepClock,
    blocks,
    free_blocks,
    job_of,
    load_of,
    spare_blocks,
    with_adapters,
    with_blocks,
)
from horizonserve.slo import Path, RequestClass

_NOTHING = Plan([], [], [], 0, 0.0, 0)


class Ending(NamedTuple):
    """A step whose output of the model has come."""

    #: Whose it is, in the order of the output; None: has left meanwhile.
    present: list[Any]
    #: Those that are noted one by one, and how many tokens each has had so far.
    had: list[tuple[Any, int]]


_NOBODY = Ending([], [])


class Lender(QueueView):
    """``QueueView`` that runs each step by the plan of policy/lending.py.

    - Who sits out has a lease of one step: vLLM's own loop passes over a running request until its
      ``next_decode_eligible_step``. It stays in ``running``, keeps slot and blocks, and can be
      aborted or preempted like any other.
    - ``running`` is put in the order of the plan, since vLLM gives its token budget away in that
      order: decodes, then prefills by due time, then those that sit out.
    - A waiting request enters when the plan gives it a token, KV blocks last for it and its
      adapter has a place beside those of all that run.
    - A step for which KV blocks may not last is vLLM's own, in order of arrival and without leases:
      vLLM then preempts the last of ``running``, and only if that is always the youngest is
      progress certain. So is the step after one in which nothing could advance.
    - Where a stage cannot split a prompt, the token budget of a step is never lowered.
    - ``lending: off`` and every other policy are ``QueueView``'s.
    """

    _needs = compat.SCHEDULER + compat.LENDER
    _plan = _NOTHING
    #: Whether the last step advanced anybody.
    _moves_on = True
    _step_log: StepLog | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._model = StepModel()
        self._lengths = Lengths()
        super().__init__(*args, **kwargs)
        self._answers = Answers(self._first_response)
        if self._admission is not None and self._settings.step_log:
            self._step_log = StepLog(self._settings.step_log)

    def add_request(self, request: Any) -> None:
        """vLLM's; the answer of a long request is made elsewhere."""
        super().add_request(request)
        ticket = _ticket(request)
        # A companion is no request of the client's.
        if ticket and ticket.path is Path.LONG and ticket.group == request.request_id:
            self._answers.expect(request)

    def _alone_s(self) -> float:
        return self._model.solo_s

    def _answer_tokens(self, request_class: RequestClass, at_most: int) -> int:
        return self._lengths.to_generate(request_class, 0, at_most)

    def _use(self, settings: Settings) -> None:
        super()._use(settings)
        self._lends_now = False
        # Every other policy counts on the order of arrival.
        self.running.sort(key=arrival_s)
        self._step_clock = StepClock(self._model, lambda: self._clock())
        self._lending = Lending(
            self._model,
            Limits(
                tokens=self.max_num_scheduled_tokens,
                requests=settings.batch,
                target_s=min(settings.slo_ms(name) for name in RequestClass) / 1e3,
                max_wait_s=settings.max_hide_s,
                splits=self._min_tokens == 1,
            ),
        )

    def _schedule_policy(self, throttle_prefills: bool, free: int) -> Any:
        if not self._settings.lends:
            return super()._schedule_policy(throttle_prefills, free)
        waits = free > 0 and (self.waiting or self.skipped_waiting)
        shown = self._candidates(free) if waits else []
        start_s = self._step_clock.start_s()
        self._model.co_run = hooks.shared is not None and hooks.shared.co_runs
        plan = self._lending.plan(self._jobs(self.running), self._jobs(shown), start_s)
        if self._moves_on and self._blocks_last(plan.tokens, len(plan.run) + len(plan.enter)):
            self._lends_now = bool(plan.lend)
            self._lease(plan)
            output = self._enter(throttle_prefills, plan.enter, plan.tokens, shown)
        else:
            self.running.sort(key=arrival_s)
            output = self._step(throttle_prefills, shown)
        self._plan = plan
        self._advanced = len(output.num_scheduled_tokens)
        self._moves_on = self._advanced > 0 or not (plan.run or plan.enter)
        if self._advanced:
            for name in output.num_scheduled_tokens:
                self.requests[name].horizonserve_ticket.served_s = start_s
            load = load_of(output, self.requests, self._model.co_run)
            self._step_clock.scheduled(output, load, start_s)
            if self._step_log is not None:
                self._step_log.add(entry(plan, self._clock()))
        return output

    @contextmanager
    def _at_most(self, tokens: int) -> Iterator[None]:
        """So many tokens in this step, as far as the stage can split prompts."""
        budget = self.max_num_scheduled_tokens
        self.max_num_scheduled_tokens = min(max(tokens, self._min_tokens), budget)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = budget

    def _enter(
        self, throttle_prefills: bool, enter: Sequence[Job], tokens: int, shown: list[Any]
    ) -> Any:
        """A step in which nobody enters but these."""
        # Companions enter with their parents; what is not fresh was never held back.
        place = {job.ticket: place for place, job in enumerate(enter)}
        shown = [r for r in shown if r.horizonserve_ticket in place or not is_fresh(r)]
        shown.sort(key=lambda r: place[r.horizonserve_ticket] if is_fresh(r) else -1)
        with self._at_most(tokens):
            return self._step(throttle_prefills, shown)

    def _step(self, throttle_prefills: bool, shown: list[Any]) -> Any:
        if self.waiting or self.skipped_waiting:
            return self._schedule_view(throttle_prefills, shown)
        return super()._schedule_policy(throttle_prefills, 0)

    def _jobs(self, requests: Iterable[Any]) -> list[Job]:
        jobs = (job_of(request, self._lengths, self) for request in requests)
        return [job for job in jobs if job is not None]

    def _candidates(self, free: int) -> list[Any]:
        """Waiting requests that may enter beside all that run, those that sit out included."""
        shown = self._choose(free)
        if self.lora_config is not None:
            shown = with_adapters(shown, self.running, self.lora_config.max_loras)
        # Without leases the stock rule holds, which counts on answers that end early.
        if self._lends_now:
            shown = with_blocks(shown, self._spare_blocks(), self._lengths, self)
        return shown[:free]

    def _spare_blocks(self) -> int:
        """KV blocks that all who run are expected to leave."""
        return spare_blocks(self.running, self._lengths, self)

    def _blocks_last(self, tokens: int, requests: int) -> bool:
        """Whether there are KV blocks for a step of so many tokens of so many requests."""
        return free_blocks(self) >= blocks(self, tokens) + blocks(self, 0) * requests

    def _lease(self, plan: Plan) -> None:
        self._sit_out([job.request for job in plan.lend])
        rank = {job.request: place for place, job in enumerate(plan.run)}
        self.running.sort(key=lambda request: rank.get(request, len(rank)))

    def _sit_out(self, requests: Sequence[Any]) -> None:
        """Leave these out of this step."""
        until = self.current_step + 2  # vLLM counts this step before it looks
        for request in requests:
            if request.next_decode_eligible_step < until:
                request.next_decode_eligible_step = until
        self._lent += len(requests)

    def step_ends(self, made: Any) -> Ending:
        """Of the requests whose output of the model has come, before vLLM takes it."""
        if self._admission is None:
            return _NOBODY
        present = list(map(self.requests.get, made.req_ids))
        return Ending(present, self._had(present))

    def _had(self, present: Sequence[Any]) -> list[tuple[Any, int]]:
        return [(request, request.num_output_tokens) for request in present if request is not None]

    def step_ended(self, output: Any, made: Any, ending: Ending) -> None:
        """Note what vLLM has taken of a step, and the time it took."""
        if self._admission is not None:
            self._note_tokens(made, ending)
            self._step_clock.ended(output, idle=not self.has_unfinished_requests())
            self._answers.poll()

    def _note_tokens(self, _made: Any, ending: Ending) -> None:
        now_s = self._clock()
        for request, before in ending.had:
            tokens = request.num_output_tokens - before
            # A session that goes on has none any more.
            if tokens > 0 and (ticket := _ticket(request)) is not None:
                self._generated(request, ticket, tokens, now_s)

    def _generated(self, request: Any, ticket: Ticket, tokens: int, now_s: float) -> None:
        """Note so many tokens of one request."""
        if ticket.path is Path.SHORT and ticket.released_s is None:
            self._first_response(Awaited(ticket, request.num_prompt_tokens), now_s)
        ticket.token(now_s, tokens)

    def _first_response(self, of: Awaited, at_s: float) -> None:
        """Learn from a request whose first response left then."""
        ticket = of.ticket
        # A class that the client claims may be none of this path's.
        if ticket.entered_s is None or ticket.request_class.path is not ticket.path:
            return
        after_s = at_s - ticket.entered_s
        self._estimator.observe(ticket.request_class, of.prompt_tokens, of.answer_tokens, after_s)
        if self._step_log is not None:
            self._step_log.add(answer(ticket, after_s))

    def shutdown(self) -> None:
        """vLLM's, and the end of what is its own."""
        if self._admission is not None:
            self._answers.close()
        if self._step_log is not None:
            self._step_log.close()
        super().shutdown()

    def request_ended(self, request: Any) -> None:
        """Note how long a request got."""
        if (ticket := _ticket(request)) is None:
            return
        if request.status is RequestStatus.FINISHED_ABORTED:
            self._answers.forget(request)
        else:
            self._lengths.ended(ticket.request_class, request.num_output_tokens)
            self._answers.left(request)

    def session_goes_on(self, session: Any) -> None:
        """Renew the promises of a session whose next input is taken up."""
        if self._admission is not None:
            session.horizonserve_ticket.renew(self._clock())


def _ticket(request: Any) -> Ticket | None:
    """None while nothing is switched on, or for a request that was in no step and no queue yet."""
    ticket: Ticket | None = getattr(request, "horizonserve_ticket", None)
    return ticket


def arrival_s(request: Any) -> float:
    """When a request arrived; every policy but lending counts on this order."""
    return float(request.horizonserve_ticket.arrival_s)


class Events(Scheduler):
    """Tells the lender what happens; first of all bases, since OmniAR's methods need not ask on."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's; a step has ended."""
        ending = self.step_ends(model_runner_output)
        result = super().update_from_output(scheduler_output, model_runner_output)
        self.step_ended(scheduler_output, model_runner_output, ending)
        return result

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.request_ended(request)
        return super()._free_request(request, *args, **kwargs)

    def _update_request_as_session(self, session: Any, update: Any) -> None:
        super()._update_request_as_session(session, update)
        self.session_goes_on(session)
