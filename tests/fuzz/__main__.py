"""``python -m fuzz``: tries mutants, and says what became of them (docs/developers/testing.md)."""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from fuzz.cases import KINDS
from fuzz.log import append, finding_lines, rows_of, summary
from fuzz.pool import verdict_rows
from fuzz.subjects import GGUF
from fuzz.worker import serve

EXIT_FINDINGS = 1


def main() -> int:
    """Runs what the command line asks for; 1 where there is a finding."""
    arguments = _arguments()
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    kinds = tuple(kind for kind in KINDS if kind.startswith(tuple(arguments.kind)))
    if not kinds:
        sys.exit(f"no kind of mutant is called {arguments.kind}; there are {', '.join(KINDS)}")
    last = arguments.seed + arguments.mutants
    wanted = range(arguments.seed, last)
    # A mutant alone is tried again; a run goes on where it was left.
    log: Path | None = arguments.log if arguments.mutants > 1 else None
    rows = [row for row in rows_of(log) if row["seed"] in wanted] if log else []
    done = {row["seed"] for row in rows}
    command = "PYTHONPATH=tests python -m fuzz"
    command += "".join(f" --kind {kind}" for kind in arguments.kind if kind)
    seeds = [seed for seed in wanted if seed not in done]
    if seeds:
        _write_missing_subjects(arguments.subjects)
        _import_once()
    work = partial(serve, subjects=arguments.subjects, kinds=kinds)
    for row in verdict_rows(iter(seeds), arguments.jobs, work):
        rows.append(row)
        if log:
            append(log, row)
        for line in finding_lines([row], command):
            print(line, flush=True)
        if log is None:
            print(row)
    print(summary(rows))
    return EXIT_FINDINGS if finding_lines(rows, command) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--mutants", type=int, default=1000, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--kind", action="append", default=[], help="only kinds that begin so")
    parser.add_argument("--log", type=Path, help="by default out/fuzz/log.jsonl")
    parser.add_argument("--subjects", type=Path, default=Path("out/fuzz/subjects"))
    arguments = parser.parse_args()
    if arguments.log is None:
        named = "".join(f"-{kind}" for kind in arguments.kind)
        arguments.log = Path("out/fuzz") / f"log{named}.jsonl"
    arguments.kind = arguments.kind or [""]
    arguments.subjects = arguments.subjects.resolve()
    return arguments


def _write_missing_subjects(subjects: Path) -> None:
    """In a process of its own: what builds has threads, and this one forks."""
    if all((subjects / name).exists() for name in ("target", "draft", "cpu", "cuda", GGUF)):
        return
    child = os.fork()
    if child == 0:
        from fuzz.subjects import write_subjects

        write_subjects(subjects)
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit(f"the originals could not be written to {subjects}")


def _import_once() -> None:
    """What every worker needs and takes long to load, before there are workers."""
    import onnx  # noqa: F401
    import torch  # noqa: F401

    import specbuild.builder.build
    import specbuild.cli.main
    import specbuild.runtime.engine  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
