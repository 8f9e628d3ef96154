"""Synthetic media: valid files, exact sizes, the same bytes for the same seed."""

from __future__ import annotations

import base64
import io
import wave

import pytest

from horizonserve.models.inputs import audio_data_url, image_data_url, video_data_url


def payload(url: str, media_type: str) -> bytes:
    head, _, data = url.partition(",")
    assert head == f"data:{media_type};base64"
    return base64.b64decode(data, validate=True)


def test_audio_is_a_wav_of_the_asked_length() -> None:
    with wave.open(io.BytesIO(payload(audio_data_url(1.5, seed=1), "audio/wav"))) as audio:
        assert audio.getframerate() == 16_000
        assert audio.getnchannels() == 1
        assert audio.getnframes() == 24_000
        assert len(set(audio.readframes(100))) > 1


@pytest.mark.parametrize("px", [1, 28, 224])
def test_image_is_a_png_of_the_asked_size(px: int) -> None:
    image = pytest.importorskip("PIL.Image")
    with image.open(io.BytesIO(payload(image_data_url(px), "image/png"))) as picture:
        picture.load()
        assert picture.size == (px, px)
        assert picture.mode == "RGB"


def test_video_is_one_still_per_frame_and_they_differ() -> None:
    image = pytest.importorskip("PIL.Image")
    head, _, stills = video_data_url(3, 56).partition(",")
    assert head == "data:video/jpeg;base64"
    frames = [base64.b64decode(still, validate=True) for still in stills.split(",")]
    assert len(set(frames)) == 3
    for frame in frames:
        with image.open(io.BytesIO(frame)) as picture:
            assert picture.size == (56, 56)


def test_same_seed_same_bytes() -> None:
    assert audio_data_url(0.1, 5) == audio_data_url(0.1, 5) != audio_data_url(0.1, 6)
    assert image_data_url(32, 5) == image_data_url(32, 5) != image_data_url(32, 6)
    assert video_data_url(2, 32, 5) == video_data_url(2, 32, 5) != video_data_url(2, 32, 6)


def test_sizes_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="seconds"):
        audio_data_url(0)
    with pytest.raises(ValueError, match="px"):
        image_data_url(0)
    with pytest.raises(ValueError, match="frames"):
        video_data_url(0, 28)
    with pytest.raises(ValueError, match="px"):
        video_data_url(1, -3)
