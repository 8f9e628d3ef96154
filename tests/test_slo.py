"""Classes and paths."""

import pytest

from horizonserve.slo import Output, Path, RequestClass, class_of


@pytest.mark.parametrize(
    ("inputs", "output", "expected"),
    [
        ((), Output.TEXT, "t2t"),
        ((), Output.AUDIO, "t2a"),
        ((), Output.IMAGE, "t2i"),
        (("audio",), Output.TEXT, "a2t"),
        (("image", "image"), Output.AUDIO, "i2a"),
        (("image",), Output.IMAGE, "i2i"),
        (("audio", "image", "video"), Output.TEXT, "v2t"),
        (("image", "audio"), Output.AUDIO, "a2a"),
        (("video",), Output.IMAGE, "i2i"),
        (("vision_chunk",), Output.TEXT, "t2t"),
    ],
)
def test_class_of(inputs: tuple[str, ...], output: Output, expected: str) -> None:
    assert class_of(inputs, output) == RequestClass(expected)


def test_only_text_is_answered_by_the_shared_stage() -> None:
    for request_class in RequestClass:
        short = request_class.path is Path.SHORT
        assert short == (request_class.output is Output.TEXT) == request_class.endswith("2t")
