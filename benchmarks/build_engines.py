"""Builds a matrix of engines with one version of specbuild, for ``compare_engines.py``.

It uses only the command line, so that one script builds with the version before a change and with
the version after. The matrix has the example with and without a draft, SpecPV, DSA and latents on
every backend; small random models of every family and kind of draft; and GPT-OSS 20B in true size,
of which all 24 layers are lowered and compiled, and two are stored. No GPU is needed, but NVRTC is.

``tensorrt_stand_in.py`` replaces TensorRT and TensorRT-RTX: its engines are records of the
library's inputs. The matrix omits what specbuild refuses (DeepSeek except on the CPU, DSA and
SpecPV for either TensorRT), and what needs a GPU (``tune``).

Large files are replaced by their digests, so that engines can be compared but not run. With
``--kernel-cache`` NVRTC never compiles the same input twice: many engines of a matrix share
kernels, and a change that does not affect their sources compiles nothing.
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
# The version of each library as installed, which the stand-in reports.
STOOD_FOR = {"tensorrt": "10.16.0.1", "tensorrt_rtx": "1.7.1.116"}
LARGE_BYTES = 64 << 20
HELP = """examples:
  python benchmarks/build_engines.py before --specbuild ../before/.venv/bin/specbuild
  python benchmarks/build_engines.py after --kernel-cache kernels
  python benchmarks/build_engines.py after --only 'random-*' '*-cpu*' --force
  python benchmarks/build_engines.py after --list

An engine that is there already is not built again without --force."""


def stand_in(folder: Path) -> Path:
    """Create a folder for PYTHONPATH in which both libraries of TensorRT are the stand-in."""
    for name, version in STOOD_FOR.items():
        about = folder / f"{name}-{version}.dist-info" / "METADATA"
        about.parent.mkdir(parents=True, exist_ok=True)
        about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        shutil.copy(STAND_IN, folder / f"{name}.py")
    return folder


def environment(libraries: Path, kernels: Path | None) -> dict[str, str]:
    """Return the environment of a build, in which Python finds ``libraries`` first."""
    cached = os.environ.get("PYTHONPATH")
    path = str(libraries) if not cached else f"{libraries}{os.pathsep}{cached}"
    # Random draws depend on the number of threads.
    inputs = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    if kernels is not None:
        shutil.copy(KERNEL_CACHE, libraries / "sitecustomize.py")
        inputs["SPECBUILD_KERNEL_CACHE"] = str(kernels.resolve())
    return inputs


def build(command: list[str], engine: Path, inputs: dict[str, str]) -> bool:
    """Build one engine and print the duration; return False if it failed."""
    started = time.monotonic()
    command = [*command, str(engine), "--force"]
    done = subprocess.run(command, env=inputs, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    if done.returncode != 0:
        message = "\n    ".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        print(f"{engine.name:<32} failed after {seconds:.0f} s: {message}", flush=True)
        return False
    print(f"{engine.name:<32} {seconds:6.0f} s", flush=True)
    return True


def replace_by_digest(file: Path) -> None:
    """Replace a file by its SHA-256 and size."""
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    about = file.with_name(f"{file.name}.sha256")
    about.write_text(f"{digest} {file.stat().st_size}\n")
    file.unlink()


def main() -> int:
    """Build the requested engines; the exit code is 0 if all were built."""
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
    args = parser.parse_args()
    names = [n for n in NAMES if any(fnmatch.fnmatch(n, glob) for glob in args.only)]
    if not names:
        parser.error(f"no engine is called {' or '.join(args.only)}; --list prints the names")
    if args.list:
        print(*names, sep="\n")
        return 0
    folder = args.folder.resolve()
    requested = [n for n in names if args.force or not (folder / n / "manifest.json").is_file()]
    created = commands(requested, folder / "checkpoints")
    kind = "plain" if args.kernel_cache is None else "cached"
    inputs = environment(stand_in(folder / f"libraries-{kind}"), args.kernel_cache)
    by_module = [sys.executable, "-m", "specbuild.cli.main"]
    specbuild = by_module if args.specbuild is None else [str(args.specbuild.absolute())]

    def one(name: str) -> bool:
        built = build([*specbuild, *created[name]], folder / name, inputs)
        if built and not args.keep_weights:
            large = [p for p in (folder / name).rglob("*.*") if p.stat().st_size > LARGE_BYTES]
            for file in large:
                replace_by_digest(file)
        return built

    started = time.monotonic()
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [
            name
            for name, built in zip(requested, pool.map(one, requested), strict=True)
            if not built
        ]
    print(f"{len(requested) - len(failed)} engines in {time.monotonic() - started:.0f} s", end="; ")
    print(f"{len(names) - len(requested)} were there; failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
