"""Tokens leave for the client when they were promised (shaper.py), around the engine's own stream.

``AsyncLLM.generate`` is read ahead of the client, so that the engine never waits for a release and its
collector never merges tokens; what was read is held until its time. Generation times, and all metrics
of vLLM, stay what they were; when tokens left is counted apart.

Not paced: requests without a promise, without streaming (`FINAL_ONLY`, `CUMULATIVE`), and with n > 1.
Errors and aborts pass at once, and a client that hangs up ends the request as it always did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from prometheus_client import Histogram
from vllm.sampling_params import RequestOutputKind

from horizonserve.config import Settings
from horizonserve.services import Services
from horizonserve.serving import compat
from horizonserve.serving.hints import parse
from horizonserve.shaper import Finish, First, Pace, Releases

_BUCKETS_S: Final = (
    *(0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0),
)
delivered_ttft = Histogram(
    "horizonserve:delivered_ttft_seconds",
    "From arrival until the first token left for the client",
    ["service"],
    buckets=_BUCKETS_S,
)
delivered_tbt = Histogram(
    "horizonserve:delivered_tbt_seconds",
    "Between two pieces that left for the client, per token of the second",
    ["service"],
    buckets=_BUCKETS_S,
)


def install(settings: Settings, services: Services) -> None:
    """Pace the streams of this process's engine client; safe to call again."""
    compat.require(compat.ENGINE_CLIENT)
    from vllm.v1.engine.async_llm import AsyncLLM

    stock = AsyncLLM.generate
    if getattr(stock, "horizonserve", False):
        return

    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[Any, None]:
        # A ValueError here is a 400 with this message.
        name, pace = promise(sampling_params, kwargs.get("lora_request"), settings, services)
        outputs = stock(self, prompt, sampling_params, request_id, **kwargs)
        streams = sampling_params.output_kind is RequestOutputKind.DELTA
        if not streams or sampling_params.n != 1 or not settings.paced:
            return outputs  # type: ignore[no-any-return]
        return paced(outputs, Releases(pace), name, time.monotonic())

    generate.horizonserve = True  # type: ignore[attr-defined]
    AsyncLLM.generate = generate


def promise(
    sampling_params: Any, lora_request: Any, settings: Settings, services: Services
) -> tuple[str, Pace]:
    """Service and pace of a request that arrives now.

    Raises:
        HintError: one of its hints is malformed.
        ServicesError: it names a service that does not exist.
    """
    hints = parse(sampling_params.extra_args)
    adapter = lora_request.lora_name if lora_request else None
    name, service = services.of(hints.service, adapter)
    ttft_s = (hints.slo_ms or service.ttft_ms) / 1e3
    tbt_s = (hints.tbt_ms or service.tbt_ms) / 1e3
    return name, Pace(
        time.monotonic() + ttft_s,
        tbt_s,
        First(settings.first_token),
        Finish(settings.on_finish),
    )


async def paced(
    outputs: AsyncGenerator[Any, None], releases: Releases, service: str, arrival_s: float
) -> AsyncGenerator[Any, None]:
    """The same outputs, each at its release time.

    Raises:
        Exception: what ``outputs`` raises, as soon as it does.
    """
    held: asyncio.Queue[tuple[float, Any]] = asyncio.Queue()
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    finished = object()

    async def read_ahead() -> None:
        try:
            async for output in outputs:
                now_s = time.monotonic()
                tokens = sum(len(one.token_ids) for one in output.outputs)
                at_once = any(o.finish_reason in ("abort", "error") for o in output.outputs)
                ends = output.finished
                release_s = releases.release_s(now_s, max(1, tokens), ends)
                held.put_nowait((now_s if at_once else release_s, output))
                if ends and release_s <= now_s and not failed.done():
                    failed.set_result(None)  # flush: nothing before it waits any longer
            held.put_nowait((0.0, finished))
        except Exception as error:
            if not failed.done():
                failed.set_exception(error)
            else:
                held.put_nowait((0.0, error))

    reader = asyncio.create_task(read_ahead())
    last_s: float | None = None
    try:
        while True:
            next_one = asyncio.ensure_future(held.get())
            await asyncio.wait({next_one, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done() and failed.exception() is not None:
                next_one.cancel()
                failed.result()
            release_s, output = await next_one
            if output is finished:
                return
            if isinstance(output, Exception):
                raise output
            if (wait_s := release_s - time.monotonic()) > 0 and not failed.done():
                await asyncio.wait({failed}, timeout=wait_s)
                if failed.done():
                    failed.result()
            last_s = _note(service, arrival_s, last_s, output)
            yield output
    finally:
        reader.cancel()
        async with aclosing(outputs):
            await asyncio.gather(reader, return_exceptions=True)
        if failed.done() and not failed.cancelled():
            failed.exception()  # seen


def _note(service: str, arrival_s: float, last_s: float | None, output: Any) -> float:
    """Count a piece that leaves now; when that is."""
    now_s = time.monotonic()
    tokens = sum(len(one.token_ids) for one in output.outputs)
    if last_s is None:
        delivered_ttft.labels(service).observe(now_s - arrival_s)
    elif tokens:
        delivered_tbt.labels(service).observe((now_s - last_s) / tokens)
    return now_s
