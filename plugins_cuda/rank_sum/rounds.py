"""The rounds of an exchange, and the threads of a round."""

from __future__ import annotations

from dataclasses import dataclass, replace

# Rows of a round; an inbox has capacity for them.
ROUND_ROWS = 256
# All CTAs must be resident on every supported GPU, together with other launches.
MAX_CTAS = 120
# Threads of a CTA, and pairs of columns of each.
_SHARES = ((128, 1), (256, 1), (512, 1), (512, 2), (512, 4))


def exchange_rounds(rows: int) -> int:
    """Return the number of rounds of an exchange of ``rows`` rows."""
    return -(-rows // ROUND_ROWS)


@dataclass(frozen=True)
class Cut:
    """``ctas`` CTAs of ``threads`` threads, with ``pairs`` adjacent columns per thread at once."""

    ctas: int
    threads: int
    pairs: int


def cut_of(rows: int, width: int, ranks: int) -> Cut:
    """Return the grid of a round: small CTAs up to the maximum number of CTAs, then larger ones.

    A thread with several pairs polls for all of them before it waits for the first. Their words, 16
    bytes per peer, must fit in its registers.
    """
    pairs = min(rows, ROUND_ROWS) * width // 2
    cuts = [Cut(-(-pairs // (t * each)), t, each) for t, each in _SHARES if each * ranks <= 8]
    fitting = [cut for cut in cuts if cut.ctas <= MAX_CTAS]
    return fitting[0] if fitting else replace(cuts[-1], ctas=MAX_CTAS)
