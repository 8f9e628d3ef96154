"""A real scheduler class on a virtual clock: a step takes what a known machine would take."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engine import make_request
from vllm.v1.outputs import ModelRunnerOutput

from horizonserve.bench.metrics import Targets
from horizonserve.bench.result import Result, Status
from horizonserve.slo import Output, RequestClass
from horizonserve.workload import Trace

TBT_S, TEXT_S, AUDIO_S = 0.055, 3.0, 22.0
PROMISES = {
    "slo_text_ms": TEXT_S * 1e3,
    "slo_audio_ms": AUDIO_S * 1e3,
    "tbt_text_ms": TBT_S * 1e3,
}
TARGETS = Targets({RequestClass.T2T: TEXT_S, RequestClass.T2A: AUDIO_S}, TBT_S)
#: A request downstream of stage 0, one at a time.
DOWNSTREAM_S = 0.9


@dataclass
class Life:
    """What happened to a request; times on the virtual clock."""

    arrival_s: float
    long: bool
    tokens: int
    token_s: list[float] = field(default_factory=list)
    first_s: float | None = None

    def result(self, index: int, start_s: float, now_s: float) -> Result:
        """As the benchmark would have recorded it in a run from ``start_s`` to ``now_s``."""
        first_s = None if self.first_s is None or self.first_s > now_s else self.first_s
        whole = first_s is not None if self.long else len(self.token_s) == self.tokens
        end_s = (first_s if self.long else self.token_s[-1]) if whole else now_s
        since_s = [] if self.long else [at_s - self.arrival_s for at_s in self.token_s]
        return Result(
            index=index,
            request_class=RequestClass.T2A if self.long else RequestClass.T2T,
            at_s=self.arrival_s - start_s,
            status=Status.OK if whole else Status.CUT,
            first_s=None if first_s is None else first_s - self.arrival_s,
            end_s=(end_s or now_s) - self.arrival_s,
            tokens=len(self.token_s),
            tpot_s=(since_s[-1] - since_s[0]) / (len(since_s) - 1) if len(since_s) > 1 else None,
            token_s=tuple(since_s),
        )


@dataclass
class Step:
    """A step of the run."""

    start_s: float
    took_s: float
    limit_s: float
    advanced: list[str]
    running: list[str]


class Virtual:
    """Plays requests on a scheduler; synchronous engine loop."""

    def __init__(self, scheduler: Any, *, noise: float = 0.0, seed: int = 0) -> None:
        self.scheduler = scheduler
        self.clock = scheduler.now_s  # the fixture's
        self.start_s = self.clock[0]
        self.rng = random.Random(seed)
        self.noise = noise
        self.slower: Callable[[float], float] = lambda _now_s: 1.0
        self.lives: dict[str, Life] = {}
        self.steps: list[Step] = []
        self._downstream_free_s = 0.0

    def play(self, trace: Trace, until_s: float = math.inf) -> None:
        """All requests of the trace, to their ends or until that time."""
        start_s = self.start_s
        items = list(trace.items)
        while items or self.scheduler.has_unfinished_requests():
            while items and start_s + items[0].at_s <= self.clock[0]:
                item = items.pop(0)
                long = item.request_class.output is not Output.TEXT
                name = f"{'l' if long else 's'}{len(self.lives)}"
                self.add(name, start_s + item.at_s, item.prompt_words, item.output_tokens)
            if self.clock[0] - start_s > until_s:
                return
            if not self.scheduler.has_unfinished_requests():
                self.clock[0] = start_s + items[0].at_s
                continue
            self.step()

    def add(self, name: str, arrival_s: float, prompt_tokens: int, tokens: int) -> None:
        """A request that arrived then; a name with "l" is long."""
        self.scheduler.add_request(
            make_request(name, prompt_tokens=prompt_tokens, output_tokens=tokens)
        )
        ticket = self.scheduler.requests[name].horizonserve_ticket
        late_s = self.clock[0] - arrival_s
        ticket.arrival_s -= late_s
        ticket.deadline_s -= late_s
        self.lives[name] = Life(arrival_s, name[0] == "l", tokens)

    def step(self) -> None:
        """One step, at the machine's price."""
        scheduler, now_s = self.scheduler, self.clock[0]
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        running = [request.request_id for request in scheduler.running]
        took_s = self._took_s(output, now_s)
        limit_s = scheduler._plan.limit_s
        self.steps.append(Step(now_s, took_s, limit_s, names, running))
        self.clock[0] = now_s + took_s
        sampled: list[list[int]] = []
        for name in names:
            request = scheduler.requests[name]
            done = request.num_computed_tokens >= request.num_tokens
            sampled.append([7] if done else [])
            if done:
                self.lives[name].token_s.append(self.clock[0])
        result = ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled)
        for per_client in scheduler.update_from_output(output, result).values():
            for one in per_client.outputs:
                self._answered(one)

    def _took_s(self, output: Any, now_s: float) -> float:
        step_s = 0.030
        for name, tokens in output.num_scheduled_tokens.items():
            context = self.scheduler.requests[name].num_computed_tokens - tokens
            step_s += 0.0035 if tokens == 1 else 0.0007 * tokens
            step_s += 2e-7 * tokens * (context + tokens / 2)
        if self._downstream_free_s > now_s:
            step_s *= 1.15
        return step_s * self.slower(now_s) * self.rng.lognormvariate(0.0, self.noise)

    def _answered(self, output: Any) -> None:
        life = self.lives[output.request_id]
        if not life.long:
            life.first_s = life.first_s or self.clock[0]
        elif output.finish_reason:
            free_s = max(self._downstream_free_s, self.clock[0])
            life.first_s = self._downstream_free_s = free_s + DOWNSTREAM_S

    def results(self) -> list[Result]:
        """Every request so far."""
        lives = enumerate(self.lives.values())
        return [life.result(index, self.start_s, self.clock[0]) for index, life in lives]

    def longest_pause_s(self) -> float:
        """Longest time for which a request sat in the stage without advancing."""
        since_s: dict[str, float] = {}
        longest_s = 0.0
        for step in self.steps:
            for name in step.running:
                since_s.setdefault(name, step.start_s)
            for name in step.advanced:
                longest_s = max(longest_s, step.start_s - since_s[name])
                since_s[name] = step.start_s + step.took_s
        return longest_s

    def longest_wait_s(self) -> float:
        """Longest time from a request's arrival until it had a slot, or until now without one."""
        entered_s: dict[str, float] = {}
        for step in self.steps:
            for name in step.running:
                entered_s.setdefault(name, step.start_s)
        lives = self.lives.items()
        return max(entered_s.get(name, self.clock[0]) - life.arrival_s for name, life in lives)
