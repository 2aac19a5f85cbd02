"""Builds a matrix of engines with one version of specbuild, for ``compare_engines.py`` to compare.

Only the command line is driven, so that one script builds with a version before a change and with
the one after. The matrix is the example with and without a draft, SpecPV, DSA and latents on every
backend; small random models of every family and kind of draft; and GPT-OSS 20B in true size: all 24
layers are lowered and compiled, two are stored and named again. No GPU is needed, but NVRTC is.

TensorRT and TensorRT-RTX are stood for by ``tensorrt_stand_in.py``, whose engines are records of
what the library would be given. Not built: what specbuild refuses (DeepSeek but on the CPU, DSA and
SpecPV for either TensorRT), and what takes a GPU to make (``tune``).

Large files are replaced by their digests, with which engines compare but do not run. With
``--kernel-cache`` NVRTC is not asked twice what it was given before, byte for byte: within a matrix
many engines share kernels, and a change that leaves their sources alone compiles nothing.
"""

from __future__ import annotations

import argparse
import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine_matrix import NAMES, commands

STAND_IN = Path(__file__).with_name("tensorrt_stand_in.py")
KERNEL_CACHE = Path(__file__).with_name("kernel_cache.py")
# What each library calls itself, as installed: the versions that the stand-in gives.
STOOD_FOR = {"tensorrt": "10.16.0.1", "tensorrt_rtx": "1.7.1.116"}
LARGE_BYTES = 64 << 20
HELP = """examples:
  python benchmarks/build_engines.py before --specbuild ../before/.venv/bin/specbuild
  python benchmarks/build_engines.py after --kernel-cache kernels
  python benchmarks/build_engines.py after --only 'random-*' '*-cpu*' --force
  python benchmarks/build_engines.py after --list

An engine that is there already is not built again without --force."""


def stand_in(folder: Path) -> Path:
    """A folder for Python's path in which both libraries of TensorRT are the stand-in."""
    for name, version in STOOD_FOR.items():
        about = folder / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        shutil.copy(STAND_IN, folder / f"{name}.py")
    return folder


def environment(libraries: Path, kernels: Path | None) -> dict[str, str]:
    """What a build starts with: Python finds ``libraries`` first."""
    known = os.environ.get("PYTHONPATH")
    path = str(libraries) if not known else f"{libraries}{os.pathsep}{known}"
    # What is drawn at random depends on the number of threads.
    given = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    if kernels is not None:
        shutil.copy(KERNEL_CACHE, libraries / "sitecustomize.py")
        given["SPECBUILD_KERNEL_CACHE"] = str(kernels.resolve())
    return given


def build(command: list[str], engine: Path, given: dict[str, str]) -> bool:
    """Builds one engine and prints how long that took; False where it failed."""
    started = time.monotonic()
    command = [*command, str(engine), "--force"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        said = "\n    ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        print(f"{engine.name:<32} failed after {seconds:.0f} s: {said}", flush=True)
        return False
    print(f"{engine.name:<32} {seconds:6.0f} s", flush=True)
    return True


def replace_by_digest(file: Path) -> None:
    """Writes a file's SHA-256 and size beside it and removes it."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    about = file.with_name(f"{file.name}.sha256")
    about.write_text(f"{digest} {file.stat().st_size}\n")
    file.unlink()


def main() -> int:
    """Builds what is asked for; the exit code: 0 where all of it was built."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="takes an engine directory for each name")
    parser.add_argument(
        "--specbuild",
        metavar="PATH",
        type=Path,
        help="the command to build with; else this Python's",
    )
    parser.add_argument("--only", metavar="GLOB", nargs="+", default=["*"], help="names to build")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="builds side by side (1)")
    parser.add_argument(
        "--kernel-cache",
        metavar="DIR",
        type=Path,
        help="keep machine code there, and take it from there for equal sources and options",
    )
    parser.add_argument("--keep-weights", action="store_true", help="leave large files as they are")
    parser.add_argument("--force", action="store_true", help="build again what is there")
    parser.add_argument("--list", action="store_true", help="print the names and build nothing")
    asked = parser.parse_args()
    names = [n for n in NAMES if any(fnmatch.fnmatch(n, glob) for glob in asked.only)]
    if not names:
        parser.error(f"no engine is called {' or '.join(asked.only)}; --list prints the names")
    if asked.list:
        print(*names, sep="\n")
        return 0
    folder = asked.folder.resolve()
    wanted = [n for n in names if asked.force or not (folder / n / "manifest.json").is_file()]
    made = commands(wanted, folder / "checkpoints")
    kind = "plain" if asked.kernel_cache is None else "cached"
    given = environment(stand_in(folder / f"libraries-{kind}"), asked.kernel_cache)
    by_module = [sys.executable, "-m", "specbuild.cli.main"]
    specbuild = by_module if asked.specbuild is None else [str(asked.specbuild.absolute())]

    def one(name: str) -> bool:
        built = build([*specbuild, *made[name]], folder / name, given)
        if built and not asked.keep_weights:
            large = [p for p in (folder / name).rglob("*.*") if p.stat().st_size > LARGE_BYTES]
            for file in large:
                replace_by_digest(file)
        return built

    started = time.monotonic()
    with ThreadPoolExecutor(asked.jobs) as pool:
        failed = [
            name for name, built in zip(wanted, pool.map(one, wanted), strict=True) if not built
        ]
    print(f"{len(wanted) - len(failed)} engines in {time.monotonic() - started:.0f} s", end="; ")
    print(f"{len(names) - len(wanted)} were there; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
