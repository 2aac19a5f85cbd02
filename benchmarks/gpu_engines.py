"""The engines that ``bench_gpu.py`` measures, and the kernel of the streaming read."""

from __future__ import annotations

import hashlib
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU = "sm_90a"
_BUILD = f"--unique-layers 2 --backend cuda --gpu {GPU} --prompts 64 --prompt-tokens 1000"
_CHAIN = "--draft-top-k 1 --draft-depth 3 --draft-tokens 3"
# Options of ``specbuild synth`` by the first word of the rows' names. Layers with a window have
# pages for 64 sequences of maximum length, so one 120B for both would not fit into 80 GB.
ENGINES = {
    "20B": f"--geometry gpt-oss-20b --draft --draft-dtype mxfp4 {_CHAIN} --max-seq-len 8448 "
    f"--max-batch-size 64 --kv-pages 1536 {_BUILD}",
    "120B": f"--geometry gpt-oss-120b --max-seq-len 1408 --max-batch-size 64 {_BUILD}",
    "120B-long": f"--geometry gpt-oss-120b --max-seq-len 8448 --max-batch-size 1 {_BUILD}",
}
BUILD_LIMIT_S = 420.0
_ERROR_CHARACTERS = 600


def say(line: str) -> None:
    """Print progress to standard error; the table goes to standard output."""
    print(line, file=sys.stderr, flush=True)


def last_words(log: Path) -> str:
    """The end of a log on one line."""
    return " ".join(log.read_text(encoding="utf-8", errors="replace").split())[-_ERROR_CHARACTERS:]


def sources_digest(options: str) -> str:
    """A digest of the sources that an engine is built from, and of its options."""
    digest = hashlib.sha256(options.encode())
    for folder in ("builder", "plugins_cuda", "runtime"):
        for file in sorted((ROOT / folder).rglob("*")):
            if file.suffix in (".py", ".cu", ".cuh", ".json"):
                digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def build_engines(
    engines: Mapping[str, Path], command: Sequence[str] | None = None
) -> dict[str, str]:
    """Build the engines that do not exist with the same sources, all at once.

    Returns the failures by label. ``command`` replaces ``specbuild synth``.
    """
    synth = [sys.executable, "-m", "specbuild.cli.main", "synth"] if command is None else command
    running, failed = {}, {}
    for label, directory in engines.items():
        options = ENGINES[label]
        stamp, digest = _stamp(directory), sources_digest(options)
        built = (directory / "manifest.json").is_file() and stamp.is_file()
        if built and stamp.read_text() == digest:
            continue
        stamp.unlink(missing_ok=True)
        log = directory.with_suffix(".build.log").open("w", encoding="utf-8")
        words = [*synth, *shlex.split(options), "--engine", str(directory), "--force"]
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        running[label] = (process, log, digest, time.monotonic())
    for label, (process, log, digest, started_s) in running.items():
        left_s = max(1.0, started_s + BUILD_LIMIT_S - time.monotonic())
        try:
            code = process.wait(left_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        log.close()
        if code == 0:
            _stamp(engines[label]).write_text(digest)
            say(f"{label}: built in {time.monotonic() - started_s:.0f} s")
        else:
            words = last_words(Path(log.name))
            failed[label] = f"`specbuild synth` ended with {code}: {words}"
            say(f"{label}: {failed[label]}")
    return failed


def _stamp(directory: Path) -> Path:
    return directory.with_suffix(".sources")


def write_read_kernel(folder: Path) -> tuple[Path | None, str | None]:
    """Compile the streaming read into ``folder``; return the file, or the failure."""
    from specbuild.cli.bench.sweep import stream_kernel

    try:
        kernel = stream_kernel(GPU)
    except Exception as error:
        return None, f"no streaming read, so no shares: {error}"
    file = folder / f"{kernel.entry}.cubin"
    file.write_bytes(kernel.cubin)
    return file, None
