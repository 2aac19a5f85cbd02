"""The errors in compute-sanitizer's logs, and known false positives of its tools."""

from __future__ import annotations

import re
from collections.abc import Iterator

# By kernel. Reports of these kernels are ignored; the pieces that launch them still run.
WRONG_ABOUT_KERNELS = {
    "racecheck": {
        # Behind a barrier of some of the warps, whose number is in a register, the tool forgets
        # what a __syncthreads() orders.
        *(
            "attend_split",
            "attend_whole",
            "attend_whole_rows",
            "attend_split_per_warp",
            "attend_few",
        ),
        # One lane arrives at an mbarrier for its warp, behind a __syncwarp(), and the tool orders
        # nothing but that lane's own reads and writes.
        *("attend_latents", "attend_listed", "attend_absorbed", "rebuild_keys", "attend_stored"),
        "attend_many",
    },
}
# By what a piece's label holds: the same of the prompts' GEMM, where plain loads read its stages;
# and of products whose partial sums take the place of their warp's own tokens (OVERLAY): the tool
# does not know that no lane comes out of mma.sync before all have read theirs.
WRONG_ABOUT_LABELS = {"racecheck": ("'wgmma': 0", "RmsSwiglu decode  9 rows, 1056 to 72, bias")}
_PIECE = re.compile(r"^\[\d+/\d+\] \d+ s: (.*)")
_PLACE = re.compile(r"^=========.* at (\w+)\+0x")


def reported(log: str) -> Iterator[tuple[str, str]]:
    """Return the label of the piece that ran, and the kernel named in each error."""
    label = ""
    for line in log.splitlines():
        if piece := _PIECE.match(line):
            label = piece[1]
        if place := _PLACE.match(line):
            yield label, place[1]


def unexplained(tool: str, log: str) -> set[tuple[str, str]]:
    """Return the errors that are not known false positives of the tool."""
    kernels, labels = WRONG_ABOUT_KERNELS.get(tool, set()), WRONG_ABOUT_LABELS.get(tool, ())
    return {
        (label, kernel)
        for label, kernel in reported(log)
        if kernel not in kernels and not any(part in label for part in labels)
    }
