"""Synthetic media as data URLs, for chat requests that need no file and no network.

The same arguments give the same bytes, so a seeded trace replays exactly.
"""

from __future__ import annotations

import base64
import io
import struct
import wave
import zlib

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 16_000


def audio_data_url(seconds: float, seed: int = 0) -> str:
    """Return ``seconds`` of 16 kHz mono noise over a tone, as a WAV data URL."""
    samples = _positive("seconds", round(seconds * SAMPLE_RATE_HZ))
    rng = np.random.default_rng(seed)
    tone = np.sin(2 * np.pi * rng.uniform(100, 400) * np.arange(samples) / SAMPLE_RATE_HZ)
    signal = 0.3 * tone + 0.05 * rng.standard_normal(samples)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE_HZ)
        out.writeframes((signal.clip(-1, 1) * 32767).astype("<i2").tobytes())
    return _data_url("audio/wav", buffer.getvalue())


def image_data_url(px: int, seed: int = 0) -> str:
    """Return a square RGB image with sides of ``px`` pixels, as a PNG data URL."""
    return _data_url("image/png", _png(_picture(px, np.random.default_rng(seed))))


def video_data_url(frames: int, px: int, seed: int = 0) -> str:
    """Return ``frames`` square frames with sides of ``px`` pixels, as one data URL.

    The server takes a video as a comma-separated list of still images (``video/jpeg``), decoded
    by content, which needs no video codec on either side.
    """
    _positive("frames", frames)
    rng = np.random.default_rng(seed)
    first = _picture(px, rng)
    stills = [np.roll(first, shift=4 * i, axis=1) for i in range(frames)]
    encoded = ",".join(base64.b64encode(_png(still)).decode() for still in stills)
    return f"data:video/jpeg;base64,{encoded}"


def _picture(px: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of random colour: not flat, yet small once compressed."""
    _positive("px", px)
    blocks: NDArray[np.uint8] = rng.integers(0, 256, size=(8, 8, 3), dtype=np.uint8)
    index = np.arange(px) * 8 // px
    picture: NDArray[np.uint8] = blocks[np.ix_(index, index)]
    return picture


def _png(pixels: NDArray[np.uint8]) -> bytes:
    height, width, _ = pixels.shape
    # Every row of a PNG starts with its filter type; 0 is "none".
    rows = np.concatenate([np.zeros((height, 1), np.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def _data_url(media_type: str, data: bytes) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def _positive(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name}: must be positive, got a value that rounds to {value}")
    return value
