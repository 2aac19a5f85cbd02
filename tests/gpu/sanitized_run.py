"""Runs stored work on the GPU: what compute-sanitizer watches, without torch and compiler.

    compute-sanitizer --tool racecheck python sanitized_run.py WORK SECONDS SHARD SHARDS [NAME ...]

Of SHARDS processes this one has every SHARDS-th piece, from number SHARD on, but for those with a
NAME in their label or as a kernel. Prints each piece before it runs, so that a report stands under
what caused it. Exit code 3: not all of it ran in the time given.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from specbuild.builder.backends.cuda.compile.nvrtc import Compiled
from specbuild.builder.backends.cuda.tuning.op_runner import OpRunner
from specbuild.plugins_cuda.launches import Kernel, Lowering
from specbuild.plugins_cuda.registry import op_named

TIME_IS_UP = 3


class Precompiled:
    """A compiler whose results exist already."""

    def __init__(self, compiled: Compiled) -> None:
        self._all = compiled

    def compile(self, kernels: Iterable[Kernel], _done: Callable[[], None]) -> Compiled:
        """Return the requested kernels, and every file."""
        return Compiled({kernel: self._all.kernels[kernel] for kernel in kernels}, self._all.files)


def main(file: Path, seconds: float, shard: int, shards: int, left_out: Sequence[str]) -> int:
    """Return the exit code."""
    began_s = time.monotonic()
    work, compiled = pickle.loads(file.read_bytes())

    def wanted(label: str, lowering: Lowering) -> bool:
        entries = {launch.kernel.entry for launch in lowering.launches}
        return not any(name in label or name in entries for name in left_out)

    work = [piece for piece in work[shard::shards] if wanted(piece[0], piece[2])]
    runner = OpRunner(Precompiled(compiled))  # type: ignore[arg-type]
    for number, (label, op, lowering, inputs, outputs) in enumerate(work):
        took_s = time.monotonic() - began_s
        if took_s > seconds:
            print(f"time is up: {len(work) - number} of {len(work)} pieces did not run")
            return TIME_IS_UP
        print(f"[{number + 1}/{len(work)}] {took_s:.0f} s: {label}", flush=True)
        runner.run(op_named(op), lowering, inputs, outputs)
    print(f"all {len(work)} pieces ran", flush=True)
    return 0


if __name__ == "__main__":
    file, seconds, shard, shards, *names = sys.argv[1:]
    sys.exit(main(Path(file), float(seconds), int(shard), int(shards), names))
