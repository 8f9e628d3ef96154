"""One streaming chat request, with the times at which its answer arrived."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from horizonserve.bench.result import Result, Status
from horizonserve.bench.server import MODEL_NAME, Server
from horizonserve.slo import Output
from horizonserve.workload import Item
from horizonserve.workload.prompt import prompt

#: An audio answer of several minutes is one line of this stream.
_LONGEST_LINE_BYTES: Final = 256 * 1024 * 1024
_CONNECT_LIMIT_S: Final = 30.0


class BadAnswerError(Exception):
    """The server said no, or what it said makes no sense."""


def open_session() -> aiohttp.ClientSession:
    """A session without a limit on connections: the load is open loop."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_LIMIT_S),
        trust_env=False,
    )


def body(item: Item) -> dict[str, Any]:
    """The chat request of an item, as JSON data."""
    media = _media(item)
    text = prompt(item.prompt_words, item.seed)
    content = [*media, {"type": "text", "text": text}] if media else text
    return {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
        # Without it a request is answered in every modality, and so is a long one.
        "modalities": [item.request_class.output.value],
        "max_tokens": item.output_tokens,
        # The answer is as long as the trace says.
        "ignore_eos": True,
        "stream": True,
        # Each chunk then says how many tokens there are so far: one may carry several.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }


def _media(item: Item) -> list[dict[str, Any]]:
    if not (item.audio_ms or item.image_px):
        return []
    # Only here, so that text needs nothing of the models package.
    from horizonserve.models import inputs

    if item.video_frames:
        url = inputs.video_data_url(item.video_frames, item.image_px, item.seed)
        return [{"type": "video_url", "video_url": {"url": url}}]
    if item.image_px:
        url = inputs.image_data_url(item.image_px, item.seed)
        return [{"type": "image_url", "image_url": {"url": url}}]
    url = inputs.audio_data_url(item.audio_ms / 1_000, item.seed)
    return [{"type": "audio_url", "audio_url": {"url": url}}]


@dataclass(slots=True)
class _Answer:
    """What has arrived so far; times on the monotonic clock."""

    output: Output
    first_at_s: float | None = None
    #: One entry per token of text.
    token_at_s: list[float] = field(default_factory=list)
    counted_tokens: int | None = None
    prompt_tokens: int = 0
    finished: bool = False
    #: An image is a first response only when it is complete.
    image_seen: bool = field(default=False)

    def take(self, chunk: dict[str, Any], now_s: float) -> None:
        if error := chunk.get("error"):
            raise BadAnswerError(f"error in the stream: {_message(error)}")
        # Audio chunks carry a count of 0, which says nothing.
        usage = chunk.get("usage") or {}
        so_far = int(usage.get("completion_tokens") or 0)
        self.prompt_tokens = int(usage.get("prompt_tokens") or 0) or self.prompt_tokens
        self.counted_tokens = so_far or self.counted_tokens
        modality = chunk.get("modality") or Output.TEXT.value
        for choice in chunk["choices"]:
            if choice.get("finish_reason") is not None:
                self.finished = True
            content = (choice.get("delta") or {}).get("content")
            if modality == Output.TEXT:
                # A token may have no text to show; without a count a chunk with text is one token.
                new = so_far - len(self.token_at_s) if so_far else int(bool(content))
                self.token_at_s += [now_s] * new
            if content:
                self._content(modality, now_s)

    def _content(self, modality: str, now_s: float) -> None:
        if modality != self.output:
            return
        if self.output is Output.IMAGE:
            self.image_seen = True
        elif self.first_at_s is None:
            self.first_at_s = now_s

    def end(self, now_s: float) -> None:
        """The stream ended; it must have been a whole answer."""
        if self.image_seen:
            self.first_at_s = now_s
        if self.first_at_s is None:
            raise BadAnswerError(f"the stream ended without {self.output.value}")
        if not self.finished:
            raise BadAnswerError("the stream ended in the middle of the answer")

    def tokens(self) -> int:
        return self.counted_tokens or len(self.token_at_s)

    def tpot_s(self) -> float | None:
        tokens = self.tokens()
        if self.output is not Output.TEXT or tokens < 2 or not self.token_at_s:
            return None
        return (self.token_at_s[-1] - self.token_at_s[0]) / (tokens - 1)


def _message(error: Any) -> str:
    text = error.get("message") if isinstance(error, dict) else error
    return str(text)[:300]


async def _chunks(response: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The chunks of an event stream up to its end mark.

    Raises:
        BadAnswerError: not such a stream, or it was cut short.
    """
    async for line in _lines(response):
        if not line.startswith(b"data:"):
            continue  # comments and keep-alives
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            yield json.loads(data)
        except ValueError as error:
            raise BadAnswerError(f"malformed chunk {data[:80]!r} ({error})") from error
    raise BadAnswerError("the server hung up before the end of the stream")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    # Our own splitting: the reader of aiohttp limits a line to 128 KiB, and audio is longer.
    parts: list[bytes] = []
    size = 0
    async for block in response.content.iter_any():
        *whole, rest = block.split(b"\n")
        for piece in whole:
            yield b"".join([*parts, piece])
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > _LONGEST_LINE_BYTES:
            raise BadAnswerError(f"a line of more than {_LONGEST_LINE_BYTES} bytes")
    yield b"".join(parts)


async def send(
    session: aiohttp.ClientSession,
    server: Server,
    item: Item,
    *,
    index: int,
    scheduled_s: float,
    limit_s: float,
    payload: dict[str, Any] | None = None,
) -> Result:
    """Send an item and follow its answer; returns a result in every case but cancellation too.

    ``scheduled_s`` is when it should have been sent, on the monotonic clock. Cancelling the call
    hangs up, which the server takes as an abort, and gives a result with ``Status.CUT``.
    """
    answer = _Answer(item.request_class.output)
    sent_s = time.monotonic()
    status, error = Status.OK, ""
    try:
        async with asyncio.timeout_at(
            asyncio.get_running_loop().time() + limit_s - (sent_s - scheduled_s)
        ):
            await _follow(session, server, payload or body(item), answer)
    except asyncio.CancelledError:
        status = Status.CUT
    except TimeoutError:
        status, error = Status.TIMEOUT, f"no end within {limit_s:g} s"
    except BadAnswerError as raised:
        status, error = Status.FAILED, str(raised)
    except (aiohttp.ClientError, OSError) as raised:
        status, error = Status.FAILED, f"{type(raised).__name__}: {raised}"
    first_s = None if answer.first_at_s is None else answer.first_at_s - scheduled_s
    is_text = item.request_class.output is Output.TEXT
    return Result(
        index=index,
        request_class=item.request_class,
        at_s=item.at_s,
        status=status,
        first_s=first_s,
        end_s=time.monotonic() - scheduled_s,
        tokens=answer.tokens(),
        prompt_tokens=answer.prompt_tokens,
        tpot_s=answer.tpot_s() if status is Status.OK else None,
        late_s=sent_s - scheduled_s,
        error=error[:300],
        token_s=tuple(at_s - scheduled_s for at_s in answer.token_at_s) if is_text else (),
    )


async def _follow(
    session: aiohttp.ClientSession, server: Server, payload: dict[str, Any], answer: _Answer
) -> None:
    headers = {"X-Request-Id": f"{server.name}-{secrets.token_hex(8)}"}
    async with session.post(
        f"{server.url}/v1/chat/completions", json=payload, headers=headers
    ) as response:
        if response.status != 200:
            text = (await response.content.read(2_000)).decode(errors="replace")
            raise BadAnswerError(f"HTTP {response.status}: {text[:200]}")
        async for chunk in _chunks(response):
            try:
                answer.take(chunk, time.monotonic())
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                text = str(chunk)[:80]
                raise BadAnswerError(f"malformed chunk {text} ({error})") from error
    answer.end(time.monotonic())
