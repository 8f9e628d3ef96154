"""Lending changes no token: our scheduler classes against the stock ones.

Random leases, KV pressure, chunked prompts, three LoRA adapters where a step holds two, and aborts,
under the memory of vLLM's V1 and V2 runners, with one step under way and with two.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from engine import free_blocks, make_request
from random_lending import RandomHalo, RandomLending
from token_worker import VOCABULARY, Worker, serve
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_omni.core.sched.omni_ar_scheduler import OmniARAsyncScheduler, OmniARScheduler

from horizonserve.serving import lender
from horizonserve.serving.plain import HorizonAsyncScheduler, HorizonScheduler
from horizonserve.serving.schedulers import HorizonARAsyncScheduler, HorizonARScheduler

pytestmark = pytest.mark.vllm
Make = Callable[..., Any]

CLASSES = {
    HorizonScheduler: Scheduler,
    HorizonAsyncScheduler: AsyncScheduler,
    HorizonARScheduler: OmniARScheduler,
    HorizonARAsyncScheduler: OmniARAsyncScheduler,
}
#: Per case; the 24 cases of a policy are more than 1,000 requests.
REQUESTS = 45
#: The longest request fills a third of the blocks, and eight run at a time.
ENGINE = {"slots": 8, "token_budget": 64, "blocks": 34, "loras": 2}


def requests(seed: int) -> dict[int, list[Any]]:
    """Requests by the step in which they arrive."""
    chance = random.Random(seed)
    arrivals: dict[int, list[Any]] = {}
    for i in range(REQUESTS):
        adapter = chance.randrange(4)
        request = make_request(
            f"{chance.choice('sl')}{i}",
            prompt_tokens=[chance.randrange(VOCABULARY) for _ in range(chance.randint(5, 120))],
            output_tokens=chance.randint(3, 40),
            lora_request=LoRARequest(f"adapter {adapter}", adapter, "nowhere") if adapter else None,
        )
        arrivals.setdefault(chance.randrange(60), []).append(request)
    return arrivals


def aborts(seed: int) -> dict[int, list[str]]:
    chance = random.Random(seed + 1)
    names = [r.request_id for group in requests(seed).values() for r in group]
    found: dict[int, list[str]] = {}
    for name in chance.sample(names, REQUESTS // 5):
        found.setdefault(chance.randrange(250), []).append(name)
    return found


def serving(scheduler: Any, seed: int, v2: bool, leaving: dict[int, list[str]]) -> Any:
    """Serve it all; returns the tokens per request and the number of preemptions."""
    scheduler.use_v2_model_runner = v2
    free = free_blocks(scheduler)
    arrivals = requests(seed)
    worker = Worker(scheduler, asynchronous=isinstance(scheduler, AsyncScheduler))
    tokens = serve(scheduler, worker, arrivals, leaving)
    assert free_blocks(scheduler) == free
    assert not scheduler.requests and not scheduler.running
    everyone = [request for group in arrivals.values() for request in group]
    return tokens, sum(request.num_preemptions for request in everyone)


@pytest.mark.parametrize("policy", ["horizon", "halo"])
@pytest.mark.parametrize("v2", [False, True], ids=["v1", "v2"])
@pytest.mark.parametrize("share", [0.5, 0.9, None], ids=["half", "most", "planned"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_tokens_are_those_of_the_stock_scheduler(
    make: Make,
    monkeypatch: pytest.MonkeyPatch,
    cls: type,
    share: float | None,
    v2: bool,
    policy: str,
) -> None:
    seed = 10 * list(CLASSES).index(cls) + v2
    expected, _ = serving(make(CLASSES[cls], **ENGINE), seed, v2, {})
    assert Counter(map(len, expected.values())).total() == REQUESTS

    few = {"batch": 3} if policy == "horizon" else {"token_budget": 6}
    scheduler = make(cls, {"scheduler": policy, **few}, **ENGINE)
    if share is not None:
        name = f"{seed} {share}"
        if policy == "halo":
            scheduler._use(scheduler._settings.changed({"token_budget": None}))
            scheduler._halo = RandomHalo(name, share, scheduler._halo.limits)
        else:
            scheduler._lending = RandomLending(name, share)
        # More may enter than KV blocks last for: leases and preemptions must bear each other.
        monkeypatch.setattr(lender, "with_blocks", lambda shown, *_: shown)
    leaving = aborts(seed)
    tokens, preemptions = serving(scheduler, seed, v2, leaving)

    aborted = {name for names in leaving.values() for name in names}
    assert scheduler._lent > 0
    assert preemptions > 0 or share is None
    assert tokens.keys() == expected.keys()
    for name, found in tokens.items():
        whole = expected[name]
        assert found == (whole[: len(found)] if name in aborted else whole), name
    assert sum(tokens[name] != expected[name] for name in aborted) > 0
