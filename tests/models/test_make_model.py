"""Building model directories: arguments, all-or-nothing writing, reuse and determinism."""

from __future__ import annotations

from pathlib import Path

import pytest

from horizonserve.models import MARKER, build, make_model, read_marker


def fake_build(size: str, out: Path, seed: int) -> None:
    (out / "weights").write_text(f"{size} {seed}")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the real builders, which need torch and seconds."""

    class Module:
        build = staticmethod(fake_build)

    monkeypatch.setattr(build, "import_module", lambda name: Module)


def contents(directory: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in directory.iterdir()}


@pytest.mark.parametrize(
    ("family", "size", "seed", "words"),
    [
        ("qwen9", "tiny", 0, ("family", "'qwen9'", "qwen2.5-omni")),
        ("qwen2.5-omni", "huge", 0, ("size", "'huge'", "tiny", "small")),
        ("qwen2.5-omni", "tiny", -1, ("seed", "-1")),
    ],
)
def test_wrong_argument_names_field_value_and_choices(
    tmp_path: Path, family: str, size: str, seed: int, words: tuple[str, ...]
) -> None:
    with pytest.raises(ValueError) as error:
        make_model(family, size, tmp_path / "m", seed)
    assert all(word in str(error.value) for word in words)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("quick")
def test_marker_says_what_is_inside(tmp_path: Path) -> None:
    out = make_model("qwen2.5-omni", "tiny", tmp_path / "sub" / "m", seed=3)
    marker = read_marker(out)
    assert marker is not None
    assert (marker.family, marker.size, marker.seed) == ("qwen2.5-omni", "tiny", 3)
    assert out.stat().st_mode & 0o055 == 0o055
    assert (out / "weights").stat().st_mode & 0o044 == 0o044


@pytest.mark.usefixtures("quick")
def test_same_model_is_reused_and_another_replaces_it(tmp_path: Path) -> None:
    out = make_model("qwen2.5-omni", "tiny", tmp_path / "m")
    (out / "weights").write_text("touched")
    make_model("qwen2.5-omni", "tiny", out)
    assert (out / "weights").read_text() == "touched"
    make_model("qwen2.5-omni", "small", out)
    assert (out / "weights").read_text() == "small 0"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("quick")
def test_foreign_directory_is_refused_and_kept(tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match=MARKER):
        make_model("qwen2.5-omni", "tiny", out)
    assert contents(out) == {"thesis.txt": b"years of work"}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.usefixtures("quick")
def test_file_in_the_way_is_refused(tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.write_text("a file")
    with pytest.raises(FileExistsError):
        make_model("qwen2.5-omni", "tiny", out)
    assert out.read_text() == "a file"


@pytest.mark.usefixtures("quick")
def test_empty_directory_is_used(tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.mkdir()
    make_model("qwen2.5-omni", "tiny", out)
    assert read_marker(out) is not None


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, OSError])
def test_interrupt_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupt: type[BaseException]
) -> None:
    class Module:
        build = staticmethod(fake_build)

    monkeypatch.setattr(build, "import_module", lambda name: Module)
    out = make_model("qwen2.5-omni", "tiny", tmp_path / "m")
    before = contents(out)

    def stop(size: str, work: Path, seed: int) -> None:
        fake_build(size, work, seed)
        raise interrupt

    monkeypatch.setattr(Module, "build", staticmethod(stop))
    for target in (out, tmp_path / "new"):
        with pytest.raises(interrupt):
            make_model("qwen2.5-omni", "small", target)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    assert contents(out) == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"family": "x"}', '{"other": 1}'])
def test_unreadable_marker_is_no_marker(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    assert read_marker(tmp_path) is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import torch

    state = torch.random.get_rng_state()
    first = contents(make_model("qwen2.5-omni", "tiny", tmp_path / "a", seed=7))
    assert torch.equal(torch.random.get_rng_state(), state)
    second = contents(make_model("qwen2.5-omni", "tiny", tmp_path / "b", seed=7))
    other = contents(make_model("qwen2.5-omni", "tiny", tmp_path / "c", seed=8))
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {
        MARKER,
        "model.safetensors",
        "spk_dict.pt",
    }
