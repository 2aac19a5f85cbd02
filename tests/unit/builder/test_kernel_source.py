"""Kernel sources: the generated constants, and the inputs of digests."""

from __future__ import annotations

from pathlib import Path

import pytest

from specbuild.builder.backends.cuda.compile import source
from specbuild.plugins_cuda.launches import Kernel

CONSTANTS = (("ROWS", 8), ("RING_STAGES", 2), ("EPS", 1e-5), ("WEIGHTS", "BF16"))
KERNEL = '#include "../_device/two.cuh"\n// A comment.\nint four = TWO + TWO;  /* two\nlines */\n'


def test_constants_are_members_of_one_struct() -> None:
    assert source.source_of(Kernel("plain", "go")).definitions() == ()
    assert source.source_of(Kernel("plain", "go", CONSTANTS)).definitions() == (
        "-DCONFIG=struct Config { static constexpr int kRows = 8; "
        "static constexpr int kRingStages = 2; static constexpr float kEps = 1e-05f; "
        "static constexpr auto kWeights = BF16; };",
    )


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("plain/kernel.cu", KERNEL), ("_device/two.cuh", "#define TWO 2\n")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(source, "PLUGINS", tmp_path)
    return tmp_path


def test_a_digest_does_not_depend_on_comments_and_paths(plugins: Path) -> None:
    before = source.source_digest("plain/kernel.cu")
    header, kernel = plugins / "_device" / "two.cuh", plugins / "plain" / "kernel.cu"
    (plugins / "plain" / "device").mkdir()
    header.rename(plugins / "plain" / "device" / "two.cuh")
    kernel.write_text(KERNEL.replace("../_device", "device").replace("A comment", "Another"))
    assert source.source_digest("plain/kernel.cu") == before
    assert source.source_digest("plain/none.cu") is None


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("_device/two.cuh", "2", "3"),
        ("plain/kernel.cu", "TWO + TWO", "TWO"),
        # A comment marker within a string begins no comment.
        ("plain/kernel.cu", "int four", 'const char* a = "//x"; int four'),
    ],
)
def test_code_changes_a_digest(plugins: Path, name: str, old: str, new: str) -> None:
    before = source.source_digest("plain/kernel.cu")
    file = plugins / name
    file.write_text(file.read_text().replace(old, new))
    changed = source.source_digest("plain/kernel.cu")
    assert changed != before
    file.write_text(file.read_text().replace("//x", "//y"))
    assert (source.source_digest("plain/kernel.cu") != changed) == ("//x" in new)


def test_a_header_counts_once_where_it_is_first_included(plugins: Path) -> None:
    device = plugins / "_device"
    (device / "three.cuh").write_text('#include "two.cuh"\n#define THREE (TWO + 1)\n')
    (plugins / "plain" / "both.cu").write_text(
        '#include "../_device/three.cuh"\n#include "../_device/two.cuh"\nint five = TWO + THREE;\n'
    )
    paths = source.included(plugins / "plain" / "both.cu")
    assert [path.name for path in paths] == ["both.cu", "three.cuh", "two.cuh"]
    assert paths[1:] == (device / "three.cuh", device / "two.cuh")
