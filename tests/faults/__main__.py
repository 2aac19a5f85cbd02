"""``python -m faults``: kills, signals, errors and full disks, and what they leave.

Runs with ``LD_PRELOAD=interposed.so``, which ``--library DIR`` makes and starts again with.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from faults.interposition import compiled, preloaded
from faults.scenarios import SCENARIOS, write_inputs
from faults.trials import Trials

KINDS = ("SIGKILL", "SIGINT", "SIGTERM", "error", "full")


def main() -> int:
    """Tries what the command line asks for; 1 where something was wrong afterwards."""
    parser = argparse.ArgumentParser(prog="python -m faults", description=__doc__)
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="by default all")
    parser.add_argument("--kind", action="append", choices=KINDS, help="by default all")
    parser.add_argument("--every", type=int, default=1, help="one fault of so many")
    parser.add_argument("--inputs", type=Path, help="by default made: engine, checkpoints, key.pem")
    parser.add_argument("--exports", type=Path, help="folder of exported graphs to share")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        if "interposed.so" not in os.environ.get("LD_PRELOAD", ""):
            return _again(Path(folder))
        _import_once(arguments.exports or Path(folder) / "exports")
        return _tried(arguments, Path(folder))


def _again(folder: Path) -> int:
    """This process's command with the library in front."""
    words = [sys.executable, "-m", "faults", *sys.argv[1:]]
    return os.waitstatus_to_exitcode(
        os.waitpid(os.spawnve(os.P_NOWAIT, words[0], words, preloaded(compiled(folder))), 0)[1]
    )


def _import_once(exports: Path) -> None:
    """What the processes need and takes long to load; none of it starts a thread."""
    import onnx  # noqa: F401
    import torch  # noqa: F401
    from content_store import use_store
    from shared_graphs import share_exports

    import specbuild.builder.build
    import specbuild.cli.main
    import specbuild.runtime.engine  # noqa: F401

    use_store(exports)
    share_exports()
    gc.freeze()


def _tried(arguments: argparse.Namespace, folder: Path) -> int:
    inputs = arguments.inputs or _written_inputs(folder / "inputs")
    kinds = tuple(arguments.kind or KINDS)
    wrong = 0
    for name in arguments.scenario or SCENARIOS:
        started = time.monotonic()
        trials = Trials(SCENARIOS[name], inputs, folder / "work")
        counts: Counter[str] = Counter()
        for trial in trials.run(kinds, arguments.every):
            counts[trial.kind] += 1
            if trial.problem is not None:
                wrong += 1
                print(f"{name}: {trial.fault} at {trial.call}: {trial.problem}", flush=True)
        told = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        seconds = time.monotonic() - started
        print(f"{name}: {len(trials.untroubled.calls)} calls; {told}; {seconds:.0f} s", flush=True)
    return int(wrong > 0)


def _written_inputs(inputs: Path) -> Path:
    """By a process of its own: what builds has threads, and this one forks."""
    child = os.fork()
    if child == 0:
        write_inputs(inputs)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, "the inputs cannot be written"
    return inputs


if __name__ == "__main__":
    sys.exit(main())
