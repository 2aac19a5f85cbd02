"""Compares included tactics with the current kernels, after a change of kernels or lowerings.

An entry is valid if its kernels have the machine code with which it was measured; see
``builder/backends/cuda/tactics/measured_code.py``. NVRTC must have the version that compiled it.
All entries are compiled and compared, since a changed lowering gives other constants to unchanged
sources.

If every entry is valid, the included files get the digests of the current sources, so that builds
need not compile to compare. Otherwise the invalid entries are printed, and nothing is written.
``--drop`` writes the files without them. ``--measure`` times their variants again, on a GPU of the
kind that the file names, and writes the updated files to a folder.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from pathlib import Path

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.tactics.measured_code import MeasuredCode, compiler_mismatches
from specbuild.builder.backends.cuda.tactics.tactic_book import SHIPPED_FILES, SHIPPED_FOLDER
from specbuild.builder.backends.cuda.tactics.tactic_file import (
    TacticEntry,
    TacticFile,
    read_tactics,
    write_tactics,
)
from specbuild.builder.backends.cuda.tuning.choice import Shape, measure_all, shape_of
from specbuild.builder.backends.cuda.tuning.timer import CandidateTimer, GpuTimer
from specbuild.builder.progress import SilentProgress
from specbuild.runtime.errors import SpecbuildError

EXAMPLES = """examples:
  python benchmarks/refresh_tactics.py
  python benchmarks/refresh_tactics.py --measure out/tactics
"""
# The tokens of a sequence, the default of ``specbuild tune``.
CONTEXT = 1024


def measured_again(
    file: TacticFile,
    entries: Iterable[TacticEntry],
    code: MeasuredCode,
    compiler: Compiler,
    timer: CandidateTimer,
) -> TacticFile:
    """Return the file with new measurements of these entries, and print them.

    An entry whose op or attributes no longer exist is omitted. Raises SpecbuildError if the timer's
    GPU is not the file's.
    """
    if timer.device != file.device:
        raise SpecbuildError(
            f"the tactics were measured on {file.device}, this GPU is {timer.device}; measure them "
            "on the former"
        )
    requested = (shape_of(entry, target_of(file.gpu)) for entry in entries)
    shapes = [shape for shape in requested if isinstance(shape, Shape)]
    result, shapes_measured = measure_all(shapes, compiler, timer, SilentProgress(), math.inf)
    for each in shapes_measured:
        print(
            f"{each.op}, {each.phase}, {each.rows} rows: {each.tactic or 'the default'}, "
            f"{each.median_us} µs, the default {each.default_us} µs"
        )
    return file.with_entries(map(code.recorded, result))


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    invalid = parser.add_mutually_exclusive_group()
    invalid.add_argument("--drop", action="store_true", help="write without the invalid entries")
    invalid.add_argument(
        "--measure", metavar="DIR", type=Path, help="time the invalid entries again, write to DIR"
    )
    return parser.parse_args()


def main() -> int:
    """Return the exit code: 0 if all entries are valid, were dropped or measured again."""
    args = parsed()
    failed = False
    for gpu, name in SHIPPED_FILES.items():
        file, compiler = read_tactics(SHIPPED_FOLDER / name), Compiler(gpu)
        code = MeasuredCode(target_of(gpu), compiler)
        code.compile(file.entries)
        valid, refused = code.valid_entries(file, compare_all=True)
        for reason in (*compiler_mismatches(file.entries, compiler.version), *refused):
            print(reason.reason)
        print(f"{name}: {len(valid.entries)} of {len(file.entries)} entries are valid", flush=True)
        if args.measure is not None:
            keys = {entry.key for entry in valid.entries}
            invalid = [entry for entry in file.entries if entry.key not in keys]
            timer = GpuTimer(compiler, CONTEXT)
            try:
                updated = measured_again(valid, invalid, code, compiler, timer)
            finally:
                timer.close()
            args.measure.mkdir(parents=True, exist_ok=True)
            write_tactics(args.measure / name, updated)
        elif refused and not args.drop:
            failed = True
        elif valid != file:
            write_tactics(SHIPPED_FOLDER / name, valid)
    return int(failed)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except SpecbuildError as error:
        sys.exit(str(error))
