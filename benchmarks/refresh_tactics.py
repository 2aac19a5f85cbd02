"""Holds shipped tactics against the kernels that are here, after a change of kernels' sources.

An entry holds where its kernels have the machine code that it was measured with; see
``builder/backends/cuda/tactics/measured_code.py``; NVRTC must be the version that made it. Where
all do, the files take the digests of the sources that are here, and builds need not compile to
compare. Else what does not hold is printed, and nothing is written without ``--drop``: measure it
again with ``specbuild tune``.
"""

from __future__ import annotations

import argparse
import sys

from specbuild.builder.backends.cuda.compile.nvrtc import Compiler, target_of
from specbuild.builder.backends.cuda.tactics.measured_code import MeasuredCode
from specbuild.builder.backends.cuda.tactics.tactic_book import SHIPPED_FILES, SHIPPED_FOLDER
from specbuild.builder.backends.cuda.tactics.tactic_file import read_tactics, write_tactics


def main() -> int:
    """The exit code: 0 where all that is shipped holds, or what does not was dropped."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drop", action="store_true", help="write without what does not hold")
    asked = parser.parse_args()
    failed = False
    for gpu, name in SHIPPED_FILES.items():
        file = read_tactics(SHIPPED_FOLDER / name)
        changed, code = file.stale_sources(), MeasuredCode(target_of(gpu), Compiler(gpu))
        held, refused = code.held(file)
        print(*(reason.reason for reason in refused), sep="\n", end="\n" * bool(refused))
        print(f"{name}: {len(changed)} kernel files changed, {len(held.entries)} entries hold")
        if refused and not asked.drop:
            failed = True
        elif changed:
            write_tactics(SHIPPED_FOLDER / name, held)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
