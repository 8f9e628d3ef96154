"""torch's streams, most of it on a real device: where there is none, torch has no streams."""

from __future__ import annotations

import pytest

from horizonserve.spatial.torch_streams import TorchStreams

torch = pytest.importorskip("torch")
on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


def test_a_change_of_stream_gives_back_what_torch_keeps_for_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given_back: list[None] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(None))
    # On a machine without CUDA torch takes a switch to no stream for nothing.
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    streams = TorchStreams(0)
    first, second = object(), object()
    for stream in (first, first, second, second, first):
        streams.use(stream)
    assert len(given_back) == 3


@on_gpu
def test_work_goes_to_the_stream_and_back() -> None:
    streams = TorchStreams(0)
    made = torch.cuda.Stream()
    wrapped = streams.wrap(made.cuda_stream)
    outer = torch.cuda.current_stream()
    with pytest.raises(KeyError), streams.use(wrapped) as surrounding:
        assert surrounding == outer.cuda_stream
        assert torch.cuda.current_stream().cuda_stream == made.cuda_stream
        raise KeyError
    assert torch.cuda.current_stream() == outer


@on_gpu
def test_uses_nest() -> None:
    streams = TorchStreams(0)
    first, second = (streams.wrap(torch.cuda.Stream().cuda_stream) for _ in range(2))
    with streams.use(first), streams.use(second) as surrounding:
        assert surrounding == first.cuda_stream
