"""How an exchange is cut into rounds, and a round among threads."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Rows of a round: what an inbox has capacity for.
ROUND_ROWS = 256
# All of them must be resident on any GPU that is built for, beside other launches.
MAX_CTAS = 120
# Threads of a CTA, and pairs of columns of each.
_SHARES = ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4))


def exchange_rounds(rows: int) -> int:
    """Numbers that an exchange of ``rows`` rows uses up."""
    return -(-rows // ROUND_ROWS)


@dataclass(frozen=True)
class Cut:
    """``ctas`` CTAs of ``threads`` threads, each with ``pairs`` neighbouring columns at a time."""

    ctas: int
    threads: int
    pairs: int


def cut_of(rows: int, width: int, ranks: int) -> Cut:
    """How the threads of a launch share a round: small CTAs while there are few, then larger ones.

    A thread that waits for several pairs looks at all of them before it waits for the first; their
    words, of 16 bytes a peer, must fit into its registers.
    """
    pairs = min(rows, ROUND_ROWS) * width // 2
    cuts = [Cut(-(-pairs // (t * each)), t, each) for t, each in _SHARES if each * ranks <= 8]
    fitting = [cut for cut in cuts if cut.ctas <= MAX_CTAS]
    return fitting[0] if fitting else replace(cuts[-1], ctas=MAX_CTAS)
