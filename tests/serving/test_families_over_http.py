"""The families beside Qwen2.5-Omni on the real server: every stage, and the paths of requests."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import secrets
import urllib.request
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizonserve import instance
from horizonserve.bench.boot import booted
from horizonserve.bench.compare import Watch
from horizonserve.bench.server import MODEL_NAME, Server
from horizonserve.models.inputs import audio_data_url
from horizonserve.spatial.report import report

pytestmark = [
    pytest.mark.server,
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]
DEPLOY = Path(__file__).parents[2] / "configs" / "deploy"
WORDS = "the quick brown fox"


@contextlib.contextmanager
def served(family: str, work: Path) -> Iterator[Server]:
    pytest.importorskip("vllm_omni")
    from horizonserve.models import make_model

    model = make_model(family, "tiny", work / "model")
    deploy = DEPLOY / f"{family.replace('-', '_')}_tiny.yaml"
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("MIMO_AUDIO_TOKENIZER_PATH", str(model / "audio_tokenizer"))
        env = {"HORIZON_SPATIAL_BACKEND": "cores"}
        with booted(model, deploy, work / "server.log", Watch(), env=env) as server:
            yield server


def answer(server: Server, output: str, content: Any = WORDS, **fields: Any) -> Any:
    """The server's message to one request."""
    request = {
        "model": MODEL_NAME,
        "messages": [{"role": "user", "content": content}],
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
        return json.load(response)["choices"][0]["message"]


def png(server: Server, **fields: Any) -> bytes:
    message = answer(server, "image", height=64, width=48, num_inference_steps=3, **fields)
    (part,) = message["content"]
    kind, _, data = part["image_url"]["url"].partition(",")
    assert kind == "data:image/png;base64"
    return base64.b64decode(data)


def sound(server: Server, content: Any = WORDS) -> Any:
    """Samples of a spoken answer of 10 words and 10 groups of codes."""
    data = answer(server, "audio", content, max_tokens=20)["audio"]["data"]
    with wave.open(io.BytesIO(base64.b64decode(data))) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2")


def admitted(server: Server) -> tuple[int, int]:
    """Requests that stage 0 took, and how many of them were long."""
    (own,) = [one for one in instance.live() if server.owns(one.pid)]
    return own.counters.admitted, own.counters.admitted_long


def assert_each_stage_took_part(server: Server) -> None:
    """Every stage's forwards ran inside the spatial loop."""
    (own,) = [one for one in instance.live() if server.owns(one.pid)]
    said = report(own.identity["spatial"], own.settings)
    assert said["state"] == "on", said
    stages = said["stages"]
    assert len(stages) == 2
    assert all(stage["alive"] and stage["level"] for stage in stages.values()), stages


def test_bagel_answers_with_text_and_images(tmp_path: Path) -> None:
    with served("bagel", tmp_path) as bagel:
        assert isinstance(answer(bagel, "text", max_tokens=4)["content"], str)
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
        # With one slot the companion follows its parent.
        (own,) = [one for one in instance.live() if bagel.owns(one.pid)]
        instance.request(own, lambda settings: settings.changed({"slots": 1}), wait_s=0.0)
        assert png(bagel, negative_prompt="old and small") == guided
        # Stage 0's keys and values reach the image: it depends on both prompts and nothing else.
        assert png(bagel) == plain != guided
        assert_each_stage_took_part(bagel)


def test_mimo_audio_answers_with_text_and_speech(tmp_path: Path) -> None:
    with served("mimo-audio", tmp_path) as mimo:
        text = answer(mimo, "text", max_tokens=12)["content"]
        assert len(text.split()) == 6  # every second token is a group of speech codes
        assert admitted(mimo) == (1, 0)
        assert len(sound(mimo)) > 24_000 and sound(mimo).std() > 0
        assert admitted(mimo) == (3, 2)
        heard = [{"type": "audio_url", "audio_url": {"url": audio_data_url(1.0)}}]
        assert len(answer(mimo, "text", heard, max_tokens=12)["content"].split()) == 6
        assert len(sound(mimo, heard)) > 24_000
        assert admitted(mimo) == (5, 3)
        assert_each_stage_took_part(mimo)
