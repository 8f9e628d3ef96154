"""torch's streams on a real device; where there is none, torch has no streams to test."""

from __future__ import annotations

import pytest

from horizonserve.spatial.torch_streams import TorchStreams

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


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


def test_uses_nest() -> None:
    streams = TorchStreams(0)
    first, second = (streams.wrap(torch.cuda.Stream().cuda_stream) for _ in range(2))
    with streams.use(first), streams.use(second) as surrounding:
        assert surrounding == first.cuda_stream
