"""Text and image output on one real server: both stages, the scheduler, companions."""

from __future__ import annotations

import base64
import json
import secrets
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horizonserve import instance
from horizonserve.bench.boot import booted
from horizonserve.bench.compare import Watch
from horizonserve.bench.server import MODEL_NAME, Server

pytestmark = [
    pytest.mark.server,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
DEPLOY = Path(__file__).parents[2] / "configs" / "deploy" / "bagel_tiny.yaml"


@pytest.fixture(scope="module")
def bagel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("vllm_omni")
    from horizonserve.models import make_model

    work = tmp_path_factory.mktemp("bagel")
    model = make_model("bagel", "tiny", work / "model")
    with booted(model, DEPLOY, work / "server.log", Watch()) as server:
        yield server


def answer(server: Server, output: str, **fields: Any) -> Any:
    """Content of the server's message to one request."""
    request = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": "the quick brown fox"}],
        "modalities": [output],
        **fields,
    }
    headers = {
        "Content-Type": "application/json",
        "X-Request-Id": f"{server.name}-{secrets.token_hex(8)}",
    }
    url = f"{server.url}/v1/chat/completions"
    post = urllib.request.Request(url, json.dumps(request).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(post, timeout=300) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def png(server: Server, **fields: Any) -> bytes:
    (part,) = answer(server, "image", height=64, width=48, num_inference_steps=3, **fields)
    kind, _, data = part["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    return base64.b64decode(data)


def admitted(server: Server) -> tuple[int, int]:
    """Requests that stage 0 took, and how many of them were long."""
    (own,) = [one for one in instance.live() if server.owns(one.pid)]
    return own.counters.admitted, own.counters.admitted_long


def test_text_and_images_come_back_and_take_their_paths(bagel: Server) -> None:
    assert isinstance(answer(bagel, "text", max_tokens=4), str)
    text = admitted(bagel)
    plain = png(bagel)
    image = admitted(bagel)
    guided = png(bagel, negative_prompt="old and small")
    both = admitted(bagel)
    assert text == (1, 0)
    assert image == (2, 1)
    assert both == (4, 3)  # the negative prompt is a companion on the same path
    size = [int.from_bytes(plain[at : at + 4]) for at in (16, 20)]  # the PNG's first chunk
    assert size == [48, 64]
    # Stage 0's keys and values reach the image: it depends on both prompts and on nothing else.
    assert png(bagel) == plain != guided
