"""Step times of a running server, as a client sees them: decode, prefill and co-running.

    python scripts/step_time.py --url http://127.0.0.1:8000 --model small

Prints Markdown tables. Every figure is a median over repeats; the machine should be idle apart
from the server. Needs a model whose tokenizer knows ``horizonserve.models.words``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from horizonserve.models.words import prompt_text

SHORT_PROMPT_TOKENS = 20
DECODE_TOKENS = 48
CO_RUN_BATCHES = (1, 4, 8)


@dataclass
class Client:
    """One open session with the server."""

    session: aiohttp.ClientSession
    url: str
    model: str

    async def stream(self, prompt: str, modality: str, max_tokens: int) -> AsyncIterator[float]:
        """Yield the monotonic time, in seconds, of each piece of output."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "modalities": [modality],
            "max_tokens": max_tokens,
            "stream": True,
        }
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise RuntimeError(f"the server answered: {event['error']}")
                if any(choice["delta"].get("content") for choice in event.get("choices", [])):
                    yield time.monotonic()

    async def first_output(self, prompt: str, modality: str, max_tokens: int) -> float:
        """Seconds from sending to the first piece of output."""
        sent = time.monotonic()
        times = [t async for t in self.stream(prompt, modality, max_tokens)]
        return times[0] - sent

    async def decode_step(self, batch: int, tokens: int = DECODE_TOKENS) -> float:
        """Median seconds between tokens while all ``batch`` requests are decoding."""

        async def one(seed: int) -> list[float]:
            prompt = prompt_text(SHORT_PROMPT_TOKENS, seed)
            return [t async for t in self.stream(prompt, "text", tokens)]

        streams = await asyncio.gather(*(one(seed) for seed in range(batch)))
        start = max(times[0] for times in streams)
        end = min(times[-1] for times in streams)
        # Tokens may arrive in clusters when the client is late, so count them over the window
        # in which the batch is complete instead of taking single gaps.
        rates = []
        for times in streams:
            inside = [t for t in times if start <= t <= end]
            if len(inside) > 1:
                rates.append((inside[-1] - inside[0]) / (len(inside) - 1))
        return statistics.median(rates)


@dataclass
class AudioLoad:
    """Keep audio requests in their downstream stages while the block runs."""

    client: Client
    done: int = 0
    _stop: bool = False
    _task: asyncio.Task[None] | None = field(default=None, repr=False)

    async def __aenter__(self) -> AudioLoad:
        self._task = asyncio.create_task(self._run())
        while not self.done and not self._task.done():  # the first one is a warm-up
            await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        # Let the last one finish: vLLM-Omni 0.30 keeps the data of a request that is aborted
        # between two stages in /dev/shm until the server stops.
        self._stop = True
        if self._task:
            await self._task

    async def _run(self) -> None:
        while not self._stop:
            # Two thinker tokens: stage 0 is asked for next to nothing, the rest for everything.
            await self.client.first_output(prompt_text(SHORT_PROMPT_TOKENS), "audio", 2)
            self.done += 1


def ms(seconds: list[float]) -> str:
    """Median of ``seconds``, in whole milliseconds."""
    return f"{1000 * statistics.median(seconds):.0f}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """Markdown table."""
    lines = [header, ["---:"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


async def measure(client: Client, args: argparse.Namespace) -> None:
    """Run every part and print its table as soon as it is known."""
    for modality in ("text", "audio"):
        await client.first_output(prompt_text(SHORT_PROMPT_TOKENS), modality, 4)

    rows = []
    for batch in args.batches:
        steps = [await client.decode_step(batch) for _ in range(args.repeats)]
        rows.append([str(batch), ms(steps), f"{batch / statistics.median(steps):.0f}"])
    print(table(["decode batch", "step (ms)", "tokens/s"], rows), end="\n\n", flush=True)

    rows = []
    for tokens in args.prompts:
        firsts = [
            await client.first_output(prompt_text(tokens, seed), "text", 1)
            for seed in range(args.repeats)
        ]
        rows.append([str(tokens), ms(firsts)])
    print(table(["prompt tokens", "TTFT alone (ms)"], rows), end="\n\n", flush=True)

    rows = []
    for batch in CO_RUN_BATCHES:
        alone = [await client.decode_step(batch) for _ in range(args.repeats)]
        async with AudioLoad(client) as load:
            before = load.done
            shared = [await client.decode_step(batch) for _ in range(args.repeats)]
            finished = load.done - before
        ratio = statistics.median(shared) / statistics.median(alone)
        rows.append([str(batch), ms(alone), ms(shared), f"{ratio:.2f}", str(finished)])
    header = ["decode batch", "step alone (ms)", "step with audio (ms)", "ratio", "audio done"]
    print(table(header, rows), end="\n\n", flush=True)

    rows = []
    for tokens in (2, 50, 100):
        firsts = [
            await client.first_output(prompt_text(SHORT_PROMPT_TOKENS, seed), "audio", tokens)
            for seed in range(args.repeats)
        ]
        rows.append([str(tokens), ms(firsts)])
    print(table(["thinker tokens", "TTFO alone (ms)"], rows), flush=True)


async def run(args: argparse.Namespace) -> None:
    """Open a session and measure."""
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        await measure(Client(session, args.url.rstrip("/"), args.model), args)


def numbers(text: str) -> list[int]:
    """Comma-separated whole numbers."""
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--batches", type=numbers, default=[1, 2, 4, 8, 12, 16, 32])
    parser.add_argument("--prompts", type=numbers, default=[64, 128, 256, 512, 1000, 1500, 2000])
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
