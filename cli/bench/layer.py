"""Which ops of a step are one layer's: what a timeline shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specbuild.runtime.engine_dir.plan import TARGET, OpCall


def middle_layer(ops: Sequence[OpCall], layers: int) -> tuple[int, range]:
    """A layer in the middle of the target, from 0, and the places of its ops in ``ops``.

    An op that a step calls once for each of ``layers`` layers marks where each begins; no ops where
    there is none, or no layer behind that ends it.
    """
    layer = (layers - 1) // 2
    target = [place for place, op in enumerate(ops) if op.section == TARGET]
    calls = Counter(ops[place].op for place in target)
    mark = next((ops[place].op for place in target if calls[ops[place].op] == layers), None)
    if mark is None or layers < 2:
        return layer, range(0)
    begins = [place for place in target if ops[place].op == mark]
    return layer, range(begins[layer], begins[layer + 1])
