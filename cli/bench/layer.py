"""Selects the ops of one layer of a step, for a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from specbuild.runtime.engine_dir.plan import TARGET, OpCall


def middle_layer(ops: Sequence[OpCall], layers: int) -> tuple[int, range]:
    """Return a layer in the middle of the target, from 0, and the indices of its ops in ``ops``.

    An op that a step calls exactly ``layers`` times marks the start of each layer. There are no
    indices without such an op, or without a following layer.
    """
    layer = (layers - 1) // 2
    target = [place for place, op in enumerate(ops) if op.section == TARGET]
    calls = Counter(ops[place].op for place in target)
    mark = next((ops[place].op for place in target if calls[ops[place].op] == layers), None)
    if mark is None or layers < 2:
        return layer, range(0)
    begins = [place for place in target if ops[place].op == mark]
    return layer, range(begins[layer], begins[layer + 1])
