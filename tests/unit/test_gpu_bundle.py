"""The parts of a GPU bundle join to an archive with the checkout, wheels and kernels."""

from __future__ import annotations

import subprocess
import tarfile
from pathlib import Path

from gpu_bundle import RUN, pack, split, tracked_files


def test_joined_parts_are_the_archive(tmp_path: Path) -> None:
    wheel, cubins = tmp_path / "some-1-py3-none-any.whl", tmp_path / "cubins.tar.xz"
    wheel.write_bytes(b"wheel")
    cubins.write_bytes(b"kernels")
    files = [file for file in tracked_files() if file.parts[0] in ("runtime", "pyproject.toml")]
    pack(tmp_path / "bundle.tar", files, [wheel], cubins)
    parts = split(tmp_path / "bundle.tar", tmp_path, 300_000)
    assert len(parts) > 1
    assert all(part.stat().st_size <= 300_000 for part in parts)
    joined = tmp_path / "joined.tar"
    joined.write_bytes(b"".join(part.read_bytes() for part in sorted(parts)))
    with tarfile.open(joined) as archive:
        archive.extractall(tmp_path / "there", filter="data")
    there = tmp_path / "there"
    assert (there / "wheels" / wheel.name).read_bytes() == b"wheel"
    assert (there / "gpu-cubins.tar.xz").read_bytes() == b"kernels"
    for file in files:
        assert (there / "checkout" / file).read_bytes() == Path(file).read_bytes()


def test_the_script_is_one_of_bash(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(RUN)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert "version=$(sed -n 's/^version = \"\\(.*\\)\"/\\1/p' pyproject.toml)" in RUN
