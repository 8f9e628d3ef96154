"""Orders of the waiting requests that HALO is compared with (HALO 6.1). Each decides the order and
nothing else; decodes go first, prompts take what is left of a fixed batch, nobody sits out.

fcfs     order of arrival (S-LoRA)
vtc-t    Virtual Token Counter: a service pays for its prompt tokens when a request starts and for
         each token it gets; the service that has paid least goes next. A service that comes back
         from idleness is lifted to the least counter of those that wait: it cannot save up.
vtc-r    the service with the largest share of late first tokens goes next
qoserve  earliest TTFT deadline first; the batch is the largest that keeps the strictest TBT
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, Protocol

from horizonserve.policy.batch import Load, StepModel
from horizonserve.policy.lending import Job
from horizonserve.policy.slack import Ticket

#: What a prompt token and an output token cost (weights of the VTC artifact).
PROMPT_PRICE: Final = 1.0
OUTPUT_PRICE: Final = 2.0


class Order(Protocol):
    """The order of one baseline, and what it counts for it."""

    def arrived(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """A request came; ``waiting``: those that wait already."""

    def started(self, ticket: Ticket) -> None:
        """A request had its first iteration; once, whatever happens to it later."""

    def generated(self, ticket: Ticket, tokens: int, first: bool, now_s: float) -> None:
        """A request got tokens, its first among them or not."""

    def order(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """Whom to let in, first to last; ``waiting`` is in order of arrival."""
        ...


class Fcfs:
    """Order of arrival."""

    def arrived(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """Counts nothing."""

    def started(self, ticket: Ticket) -> None:
        """Counts nothing."""

    def generated(self, ticket: Ticket, tokens: int, first: bool, now_s: float) -> None:
        """Counts nothing."""

    def order(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """As they came."""
        return list(waiting)


class EarliestDeadline(Fcfs):
    """By TTFT deadline; of equals the first to come."""

    def order(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """By deadline."""
        return sorted(waiting, key=lambda ticket: ticket.deadline_s)


class VtcTokens(Fcfs):
    """Virtual Token Counter (Sheng et al., OSDI 2024)."""

    def __init__(
        self, prompt_price: float = PROMPT_PRICE, output_price: float = OUTPUT_PRICE
    ) -> None:
        self._prompt_price, self._output_price = prompt_price, output_price
        #: What each service has had.
        self.paid: dict[str, float] = {}

    def arrived(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """Lift a service that comes back from idleness."""
        queued = {other.service for other in waiting}
        own = self.paid.setdefault(ticket.service, 0.0)
        if queued and ticket.service not in queued:
            least = min(self.paid.get(name, 0.0) for name in queued)
            self.paid[ticket.service] = max(own, least)

    def started(self, ticket: Ticket) -> None:
        """Pay for the prompt."""
        self._pay(ticket, self._prompt_price * ticket.prompt_tokens)

    def generated(self, ticket: Ticket, tokens: int, first: bool, now_s: float) -> None:
        """Pay for the output."""
        self._pay(ticket, self._output_price * tokens)

    def _pay(self, ticket: Ticket, price: float) -> None:
        # One that came before this order was in use has not arrived here.
        self.paid[ticket.service] = self.paid.get(ticket.service, 0.0) + price

    def order(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """The first of the service that has paid least, again and again, as if it had paid."""
        queues: dict[str, deque[Ticket]] = {}
        for ticket in waiting:
            queues.setdefault(ticket.service, deque()).append(ticket)
        paid = {name: self.paid.get(name, 0.0) for name in queues}
        order = []
        while queues:
            name = min(queues, key=lambda service: (paid[service], service))
            ticket = queues[name].popleft()
            order.append(ticket)
            paid[name] += self._prompt_price * ticket.prompt_tokens
            if not queues[name]:
                del queues[name]
        return order


class VtcRate(Fcfs):
    """By share of late first tokens."""

    def __init__(self) -> None:
        self._arrived: dict[str, int] = {}
        self._late: dict[str, int] = {}

    def arrived(self, ticket: Ticket, waiting: Iterable[Ticket]) -> None:
        """Count it."""
        self._arrived[ticket.service] = self._arrived.get(ticket.service, 0) + 1

    def generated(self, ticket: Ticket, tokens: int, first: bool, now_s: float) -> None:
        """Count a late first token."""
        if first and now_s > ticket.deadline_s:
            self._late[ticket.service] = self._late.get(ticket.service, 0) + 1

    def order(self, waiting: Sequence[Ticket], now_s: float) -> list[Ticket]:
        """The service with the most late first tokens, those that wait past theirs included."""
        late = dict(self._late)
        for ticket in waiting:
            if now_s > ticket.deadline_s:
                late[ticket.service] = late.get(ticket.service, 0) + 1
        # Some were here before this order was in use: no more than all can be late.
        share = {n: min(1.0, late.get(n, 0) / count) for n, count in self._arrived.items()}
        return sorted(waiting, key=lambda ticket: -share.get(ticket.service, 0.0))


#: Context for which the static batch of QoServe is profiled (HALO 6.1).
REFERENCE_CONTEXT_TOKENS: Final = 1_024
#: A predicted iteration is planned to end this share of the target before it must.
MARGIN: Final = 0.1


def strictest_batch_tokens(
    model: StepModel, running: Sequence[Job], most: int, static: bool
) -> int:
    """QoServe's batch: the most tokens with which an iteration keeps the strictest TBT that runs.

    ``static``: for decodes of the reference context, as HALO describes it; else for those that
    run, as QoServe does. At least one token more than there are decodes, at most ``most``.
    """
    decodes = [job for job in running if job.decode]
    target_s = min((job.ticket.tbt_s for job in running), default=inf)
    if target_s == inf:
        return most
    if static:
        per_token_s = model.decode_s(REFERENCE_CONTEXT_TOKENS)
        left_s = target_s * (1 - MARGIN) - model.fixed_s
        fits = left_s / per_token_s if per_token_s > 0 else most
        return max(len(decodes) + 1, min(most, int(fits)))
    return max(len(decodes) + 1, tokens_within(model, target_s * (1 - MARGIN), decodes, most))


def tokens_within(model: StepModel, target_s: float, decodes: Sequence[Job], most: int) -> int:
    """Most tokens of an iteration that ends within the target: the decodes, then prompts.

    As many as there are decodes at least, ``most`` at most.
    """
    contexts = sum(job.context_tokens for job in decodes)
    base_s = model.step_s(Load(len(decodes), 0, float(contexts), model.co_run))
    per_token_s = model.prefill_s(1, 0)
    if per_token_s <= 0:
        return most
    spare = max(0.0, target_s - base_s) / per_token_s
    return max(len(decodes), min(most, len(decodes) + int(min(spare, most))))


def order_of(scheduler: str) -> Order:
    """The order of a baseline, by the name of its scheduler."""
    orders: dict[str, type[Fcfs]] = {"fcfs": Fcfs, "vtc-t": VtcTokens, "vtc-r": VtcRate}
    return orders.get(scheduler, EarliestDeadline)()
