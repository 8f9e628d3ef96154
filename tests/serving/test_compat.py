"""Start-up checks name what is missing."""

import pytest

from horizonserve.serving import compat

pytestmark = pytest.mark.vllm

EVERYTHING = (
    *(compat.SCHEDULER + compat.OMNI_SCHEDULER + compat.FRONT_END + compat.LAUNCH + compat.GRAPHS),
    *(compat.LENDER + compat.HALO + compat.ENGINE_CLIENT + compat.OMNI_CLIENT),
)


def test_the_supported_versions_have_everything() -> None:
    compat.require(EVERYTHING)


@pytest.mark.parametrize(
    "name",
    [
        ("vllm.nowhere", "Anything"),
        ("vllm.v1.core.sched.scheduler", "Scheduler.schedule_it_all"),
        ("vllm.v1.core.sched.scheduler", "Nobody.schedule"),
        ("vllm.compilation.cuda_graph", "CUDAGraphWrapper.abstract_cudagraph_entries"),
    ],
)
def test_a_missing_name_stops_the_start_and_is_named(name: compat.Name) -> None:
    with pytest.raises(compat.CompatError) as caught:
        compat.require((*EVERYTHING, name))
    message = str(caught.value)
    assert ".".join(name) in message
    assert "0.30" in message
    assert "vllm-omni 0.30" in compat.installed()
