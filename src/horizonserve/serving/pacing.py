"""Tokens leave for the client when they were promised (shaper.py).

Two patches of vLLM's engine client, in every process that has one, and one of vLLM-Omni's:

- ``AsyncLLM.generate`` refuses a malformed promise before anything is sent, so that it is a 400;
- the collector that hands a request's outputs to its stream holds them until their release. Nothing
  before it waits: detokenizing, stop strings and vLLM's own metrics keep generation times. When
  tokens left is counted apart;
- ``AsyncOmni.generate`` has no collector, so the text answers of the shared stage pass through one.

Not paced: requests without streaming (``FINAL_ONLY``, ``CUMULATIVE``), with n > 1, and sessions
whose input is a stream. Errors and aborts pass at once.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from functools import wraps
from typing import Any, Final

from prometheus_client import Histogram
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from horizonserve.config import Settings
from horizonserve.services import Promised, Services
from horizonserve.serving import compat
from horizonserve.serving.hints import parse
from horizonserve.shaper import Finish, First, Pace, Releases
from horizonserve.spatial.monitor import SHARED_STAGE

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
    "Between two pieces that left for the client, per token of the first",
    ["service"],
    buckets=_BUCKETS_S,
)


def install(settings: Settings, services: Services) -> None:
    """Pace the streams of this process's engine client; safe to call again."""
    compat.require(compat.ENGINE_CLIENT)
    from vllm.v1.engine import async_llm

    client: Any = async_llm.AsyncLLM
    if async_llm.RequestOutputCollector is PacedCollector:
        return
    async_llm.RequestOutputCollector = PacedCollector
    stock_generate, stock_add = client.generate, client.add_request

    def generate(
        self: Any, prompt: Any, sampling_params: Any, request_id: str, **kwargs: Any
    ) -> Any:
        promised(sampling_params, kwargs.get("lora_request"), services)
        return stock_generate(self, prompt, sampling_params, request_id, **kwargs)

    async def add_request(
        self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        arrival_s = time.monotonic()
        queue = await stock_add(self, request_id, prompt, params, *args, **kwargs)
        if _paces(settings) and _streams(params) and queue._input_stream_task is None:
            found = promised(params, kwargs.get("lora_request"), services)
            queue.pace(found, settings, arrival_s)
        return queue

    client.generate, client.add_request = generate, add_request


def install_omni(settings: Settings, services: Services) -> None:
    """Pace the text streams of vLLM-Omni's engine client; safe to call again."""
    compat.require(compat.OMNI_CLIENT)
    from vllm_omni.entrypoints.async_omni import AsyncOmni

    stock = AsyncOmni.generate
    if getattr(stock, "paced", False):
        return

    @wraps(stock)
    def generate(
        self: Any,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        sampling_params_list: Any = None,
        output_modalities: Any = None,
        lora_request: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = sampling_params if sampling_params_list is None else sampling_params_list
        first = given[0] if isinstance(given, Sequence) else given
        text = self._compute_final_stage_id(output_modalities) == SHARED_STAGE
        arrival_s = time.monotonic()
        # A ValueError here, before generation starts, is a 400 with this message.
        found = promised(first, lora_request, services) if text and first is not None else None
        stream = stock(
            self,
            prompt,
            sampling_params,
            request_id,
            sampling_params_list=sampling_params_list,
            output_modalities=output_modalities,
            lora_request=lora_request,
            **kwargs,
        )
        session = isinstance(prompt, AsyncGenerator)
        if found is None or session or not (_paces(settings) and _streams(first)):
            return stream
        collector = PacedCollector(RequestOutputKind.DELTA, request_id)
        collector.merges = False
        collector.pace(found, settings, arrival_s)
        return paced(stream, collector)

    generate.paced = True  # type: ignore[attr-defined]
    AsyncOmni.generate = generate


async def paced(stream: Any, collector: PacedCollector) -> AsyncIterator[Any]:
    """The outputs of a stream when they are due."""

    async def pump() -> None:
        try:
            async for output in stream:
                collector.put(output)
        except Exception as error:
            collector.put(error)

    task = asyncio.create_task(pump())
    task.add_done_callback(lambda _: collector.ready.set())
    try:
        while True:
            while (output := collector.get_nowait()) is None:
                if task.done() and not collector.holds:
                    if task.cancelled():
                        raise asyncio.CancelledError
                    return
                await collector.turn()
            yield output
    finally:
        collector.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def promised(params: Any, lora_request: Any, services: Services) -> Promised:
    """Service and promises of a request.

    Raises:
        HintError: one of its hints is malformed.
        ServicesError: it names a service that does not exist.
    """
    hints = parse(params.extra_args)
    adapter = lora_request.lora_name if lora_request else None
    return services.promised(hints.service, adapter, hints.slo_ms, hints.tbt_ms)


def _paces(settings: Settings) -> bool:
    return settings.paced and settings.scheduler == "halo"


def _streams(params: Any) -> bool:
    return (
        isinstance(params, SamplingParams)
        and params.output_kind is RequestOutputKind.DELTA
        and params.n == 1
    )


class PacedCollector(RequestOutputCollector):
    """vLLM's collector; once it has a pace, outputs are handed over at their release times.

    Outputs that are due together are merged, as vLLM's own collector merges what a slow consumer
    has not taken.
    """

    _releases: Releases | None = None
    #: vLLM's own merging loses what vLLM-Omni adds to an output.
    merges = True

    def pace(self, promise: Promised, settings: Settings, arrival_s: float) -> None:
        """Hold what comes from now on until it was promised; times on the monotonic clock."""
        pace = Pace(
            arrival_s + promise.ttft_s,
            promise.tbt_s,
            First(settings.first_token),
            Finish(settings.on_finish),
        )
        self._releases = Releases(pace)
        self._service, self._arrival_s = promise.service, arrival_s
        #: (release, output), oldest first.
        self._held: deque[tuple[float, RequestOutput]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        #: When the last piece left, and of how many tokens it was.
        self._left: tuple[float, int] | None = None

    def put(self, output: Any) -> None:
        """Take an output of the engine."""
        if self._releases is None or not isinstance(output, RequestOutput):
            super().put(output)
            return
        now_s = time.monotonic()
        reasons = {one.finish_reason for one in output.outputs}
        release_s = self._releases.release_s(now_s, max(1, _tokens(output)), output.finished)
        if reasons & {"abort", "error"}:
            release_s = now_s
        if output.finished and release_s <= now_s:
            # Nothing before the end of an answer that is let go waits any longer.
            self._held = deque((now_s, held) for _, held in self._held)
        self._held.append((release_s, output))
        self._wake()

    def get_nowait(self) -> Any:
        """What is due, if anything is."""
        # An error, or what came before the pace was set.
        if self._releases is None or self.output is not None:
            return super().get_nowait()
        if not self._is_due():
            return None
        _, output = self._held.popleft()
        while self.merges and self._is_due():
            output.add(self._held.popleft()[1], aggregate=self.aggregate)
        self.ready.clear()
        self._wake()
        self._count(output)
        return output

    async def get(self) -> Any:
        """The next output, when it is due."""
        while (output := self.get_nowait()) is None:
            await self.turn()
        return output

    async def turn(self) -> None:
        """Wait until there may be something."""
        self.ready.clear()
        self._wake()
        await self.ready.wait()

    @property
    def holds(self) -> bool:
        """Whether there is something that is not due yet."""
        return bool(self._held)

    def close(self) -> None:
        """No more is handed over."""
        if self._releases is not None:
            self._held.clear()
            self._wake()
        super().close()

    def _is_due(self) -> bool:
        return bool(self._held) and self._held[0][0] <= time.monotonic()

    def _wake(self) -> None:
        """Let the consumer look when the next output is due."""
        if self._releases is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._held:
            wait_s = self._held[0][0] - time.monotonic()
            if wait_s <= 0:
                self.ready.set()
            else:
                self._timer = asyncio.get_running_loop().call_later(wait_s, self._wake)

    def _count(self, output: RequestOutput) -> None:
        now_s = time.monotonic()
        if self._left is None:
            delivered_ttft.labels(self._service).observe(now_s - self._arrival_s)
        else:
            last_s, tokens = self._left
            delivered_tbt.labels(self._service).observe((now_s - last_s) / max(1, tokens))
        self._left = now_s, _tokens(output)


def _tokens(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)
