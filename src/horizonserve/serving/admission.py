"""From a vLLM request to a policy ticket, once, when the request enters the shared stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from math import inf, log
from typing import Any, Final

from vllm.logger import init_logger

from horizonserve.config import Settings
from horizonserve.policy.estimate import Estimator
from horizonserve.policy.slack import Ticket
from horizonserve.serving.hints import NO_HINTS, HintError, Hints, parse
from horizonserve.slo import OUTPUT_OF_PRIORITY, Output, Path, RequestClass, class_of

logger = init_logger(f"vllm.{__name__}")

# ``arrival_time`` is wall time of another process; beyond this it is a stepped clock or a test.
MAX_QUEUED_S: Final = 600.0
#: Estimates are rounded to powers of this.
COARSE: Final = 1.1
_LOG_COARSE: Final = log(COARSE)


class Admission:
    """Classifies requests and stamps their deadlines.

    - Path: short iff the final stage is stage 0 and no KV transfer is forced.
    - Class: the client's hint, else its priority, else the inputs and the final stage's output.
    - Deadline: arrival + SLO, on the monotonic clock.
    - Time between tokens: the client's hint, else the class's; promised to short requests only.
    - A companion (``parent`` + suffix) shares its parent's ticket.
    """

    def __init__(
        self,
        settings: Settings,
        final_outputs: Mapping[int, Output],
        route: Callable[[Any], tuple[int, bool]],
        estimator: Estimator,
        clock: Callable[[], float] = time.monotonic,
        solo_s: Callable[[], float] = lambda: 0.0,
        answer_tokens: Callable[[RequestClass, int], int] = lambda _, at_most: at_most,
    ) -> None:
        """A pipeline's ways.

        ``final_outputs``: stage id -> what it gives the user; ``route``: request -> its final
        stage and whether it is there to hand its KV cache on; ``solo_s``: time per token of a
        request alone, 0 while that is unknown; ``answer_tokens``: class and most tokens -> expected
        length of an answer.
        """
        self._long_outputs = {
            stage: output for stage, output in final_outputs.items() if output is not Output.TEXT
        }
        self._any_long_output = next(iter(self._long_outputs.values()), Output.AUDIO)
        self._route = route
        self._clock = clock
        self._warned = False
        self._solo_s = solo_s
        self._estimator = estimator
        self._answer_tokens = answer_tokens
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Apply these settings to requests that enter from now on."""
        self._slo_multiple = settings.slo_multiple
        self._settings = settings
        self._slo_s = {name: settings.slo_ms(name) / 1e3 for name in RequestClass}
        self._constant_s = estimates_s(settings)
        self._estimator.start(self._constant_s)

    def admit(self, request: Any, present: Mapping[str, Any]) -> Ticket:
        """Give a request its ticket, ``request.horizonserve_ticket``, and return it.

        Args:
            request: a vLLM ``Request``; an ``OmniRequest`` where the stage is part of a pipeline.
            present: the requests in the scheduler by id, among which a companion's parent is.
        """
        hints = self._hints(request)
        if hints.priority is not None:
            # The front end of vLLM-Omni 0.30 drops the body's priority; ours sends it as a hint.
            request.priority = hints.priority
        request.horizonserve_ticket = ticket = self._ticket(request, hints, present)
        return ticket

    def _ticket(self, request: Any, hints: Hints, present: Mapping[str, Any]) -> Ticket:
        final_stage, companion = self._route(request)
        if companion and (parent := _parent(request.request_id, present)) is not None:
            shared: Ticket = present[parent].horizonserve_ticket
            return shared
        path = Path.LONG if companion or final_stage != 0 else Path.SHORT
        request_class = hints.slo_class or self._class_of(request, path, final_stage, hints)
        now_s = self._clock()
        queued_s = time.time() - request.arrival_time
        arrival_s = now_s - queued_s if 0 <= queued_s <= MAX_QUEUED_S else now_s
        slo_s = self._slo_s[request_class]
        estimate_s = _coarse(self._estimate_s(request, request_class, path))
        if hints.slo_ms is not None:
            slo_s = hints.slo_ms / 1e3
            # Who asks for less time expects to need less; else it would be lost on arrival.
            estimate_s = min(estimate_s, slo_s / self._slo_multiple)
        tbt_s = inf
        if path is Path.SHORT:
            tbt_ms = hints.tbt_ms or self._settings.tbt_ms(request_class, self._solo_s() * 1e3)
            tbt_s = tbt_ms / 1e3
        # By position: keywords would cost as much as all the rest.
        return Ticket(
            request.request_id, request_class, path, arrival_s, arrival_s + slo_s, estimate_s, tbt_s
        )

    def _estimate_s(self, request: Any, request_class: RequestClass, path: Path) -> float:
        if self._settings.estimates == "constant":
            return self._constant_s[request_class]
        answer_tokens = 0
        if path is Path.LONG:
            answer_tokens = self._answer_tokens(request_class, request.max_tokens)
        prompt_tokens = request.num_prompt_tokens
        return self._estimator.estimate_s(request_class, prompt_tokens, answer_tokens)

    def _hints(self, request: Any) -> Hints:
        params = request.sampling_params
        arguments = params.extra_args if params is not None else None
        if not arguments:
            return NO_HINTS
        try:
            return parse(arguments)
        except HintError as error:
            # The front end answers 400 where it can; a request that came another way is served
            # under its class's default, because a hint must never cost a stage its life.
            if not self._warned:
                self._warned = True
                logger.warning("request %s: ignored hint %s", request.request_id, error)
            return NO_HINTS

    def _class_of(self, request: Any, path: Path, final_stage: int, hints: Hints) -> RequestClass:
        # A priority of 0 is vLLM's default as well, so it says something only as a hint.
        priority = request.priority or hints.priority
        output = OUTPUT_OF_PRIORITY.get(priority) if priority is not None else None
        if output is None and path is Path.SHORT:
            output = Output.TEXT
        elif output is None:
            # A companion is stamped as stage 0.
            output = self._long_outputs.get(final_stage, self._any_long_output)
        features = request.mm_features
        return class_of([f.modality for f in features] if features else (), output)


def estimates_s(settings: Settings) -> dict[RequestClass, float]:
    """What each class takes before anything was learned of it."""
    return {name: settings.estimated_ms(name) / 1e3 for name in RequestClass}


def _coarse(estimate_s: float) -> float:
    """To a tenth: waiting requests with equal estimates are kept in one line (waiting.py)."""
    return COARSE ** round(log(estimate_s) / _LOG_COARSE)


def _parent(companion: str, present: Iterable[str]) -> str | None:
    """The longest other id that a companion's id extends; None when it came alone."""
    parents = [name for name in present if companion.startswith(name) and name != companion]
    return max(parents, key=len, default=None)
