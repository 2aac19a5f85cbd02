"""Pack what the GPU suite needs on a machine without a network, in parts that can be copied.

    python tests/gpu_bundle.py out/gpu-bundle [--python 3.12] [--part-mb 60]

writes part-00, part-01, … and run.sh, and prints the commands for the other machine. The parts are
one tar archive: the tracked files of the checkout, the wheels that a machine with PyTorch, ONNX and
ONNX Script usually lacks, and the kernels of `make gpu-cubins` if they are in out/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CUBINS = ROOT / "out" / "gpu-cubins.tar.xz"
PACKAGES = (
    *("annotated-doc", "annotated-types", "compressed-tensors", "cuda-bindings", "cuda-pathfinder"),
    *("gguf", "httptools", "llguidance", "loguru", "onnx-graphsurgeon", "onnxruntime"),
    *("pydantic", "pydantic-core", "rich"),
    *("starlette", "typer", "typing-inspection", "uvicorn", "xxhash"),
    *("hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "execnet", "iniconfig", "pluggy"),
)
PLATFORMS = ("manylinux_2_28", "manylinux_2_31", "manylinux_2_27", "manylinux2014", "manylinux1")

# Wheels are unpacked into a folder of their own, ahead of the installed packages.
RUN = """#!/usr/bin/env bash
# Runs the GPU suite: bash run.sh [options of pytest]. Logs and JUnit files are in checkout/out.
set -eu
cd "$(dirname "$0")/checkout"
version=$(sed -n 's/^version = "\\(.*\\)"/\\1/p' pyproject.toml)
metadata=../packages/specbuild-$version.dist-info
for wheel in ../wheels/*.whl; do python3 -m zipfile -e "$wheel" ../packages; done
make -s types PYTHON=python3
mkdir -p out "$metadata"
printf 'Metadata-Version: 2.1\\nName: specbuild\\nVersion: %s\\n' "$version" > "$metadata/METADATA"
export PYTHONPATH="$PWD/out/types:$PWD/../packages" OMP_NUM_THREADS=1
export SPECBUILD_GPU_CUBINS="$PWD/../gpu-cubins.tar.xz" SPECBUILD_TEST_STORE="$PWD/../store"
failed=0
python3 -m pytest tests/gpu -n "$(nproc)" --dist loadgroup --no-loadscope-reorder \\
  -m 'gpu and not slow and not speed' -rfE --junitxml out/test-gpu.xml "$@" || failed=1
python3 -m pytest tests/gpu -m 'gpu and speed and not slow' -rfE \\
  --junitxml out/test-gpu-speed.xml "$@" || failed=1
exit $failed
"""


def download_wheels(folder: Path, python: str) -> None:
    """Download the pinned wheels for CPython ``python`` on Linux x86-64.

    pip's messages go to standard error.
    """
    tags = [flag for name in PLATFORMS for flag in ("--platform", f"{name}_x86_64")]
    abis = ["--abi", "cp" + python.replace(".", ""), "--abi", "abi3", "--abi", "none"]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    options = ["--only-binary", ":all:", "--python-version", python, "--implementation", "cp"]
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run(
        [*command, str(folder), *options, *abis, *tags, *pins, *PACKAGES],
        check=True,
        stdout=sys.stderr,
    )


def tracked_files() -> list[Path]:
    """Return the checkout's files, relative to it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return [Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).exists()]


def pack(archive: Path, files: Sequence[Path], wheels: Sequence[Path], cubins: Path) -> None:
    """Write the tar archive whose parts are copied."""
    with tarfile.open(archive, "w") as packed:
        for file in files:
            packed.add(ROOT / file, Path("checkout") / file, recursive=False)
        for wheel in wheels:
            packed.add(wheel, Path("wheels") / wheel.name)
        if cubins.exists():
            packed.add(cubins, "gpu-cubins.tar.xz")


def split(archive: Path, folder: Path, part_bytes: int) -> list[Path]:
    """Cut an archive into files of at most ``part_bytes``; joined in order they are the archive."""
    parts: list[Path] = []
    with archive.open("rb") as source:
        while data := source.read(part_bytes):
            parts.append(folder / f"part-{len(parts):02}")
            parts[-1].write_bytes(data)
    return parts


def main() -> None:
    """Write the bundle and print how to use it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--python", default="3.12", help="version there (default: 3.12)")
    parser.add_argument("--part-mb", type=int, default=60, help="most MB of a part (default: 60)")
    asked = parser.parse_args()
    shutil.rmtree(asked.output, ignore_errors=True)
    asked.output.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheels, archive = Path(scratch) / "wheels", Path(scratch) / "bundle.tar"
        download_wheels(wheels, asked.python)
        pack(archive, tracked_files(), sorted(wheels.glob("*.whl")), CUBINS)
        parts = split(archive, asked.output, asked.part_mb * 10**6)
    (asked.output / "run.sh").write_text(RUN)
    if not CUBINS.exists():
        print("without kernels: `make gpu-cubins` first, or have NVRTC 13.2 or later there")
    for part in (*parts, asked.output / "run.sh"):
        print(f"copy {part} ({part.stat().st_size / 1e6:.1f} MB)")
    print("then, in the folder with the copies: cat part-* | tar x && bash run.sh")


if __name__ == "__main__":
    main()
