"""The device memory that an op call reads and its operations, as numbers in a plan.

Counted are bytes in device memory as the kernels read them: each weight once for any number of
rows, the experts that rows select, and the keys and values that rows attend to. Activations, the
step's state and page tables stay in the L2 cache or are negligible.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from specbuild.runtime.engine_dir.features import of_feature

Part = Literal["dense", "experts", "head", "kv_full", "kv_sliding"]
Per = Literal[
    "pass", "row", "logit_row", "chosen_expert", "seen_token", "row_token_pair", "chosen_token"
]


@dataclass(frozen=True)
class Term:
    """``amount`` bytes, or multiplications and additions, for each ``per`` of a pass.

    ``pass``: once. ``row``: each row. ``logit_row``: a row with requested logits.
    ``chosen_expert``: an expert that rows select. ``seen_token``: a token of a sequence that any of
    its rows attends to. ``row_token_pair``: a row and a token that it attends to. Both are limited
    to ``window`` (0: none). ``chosen_token``: a token on the list of a row with DSA.
    """

    part: Part
    amount: int
    per: Per
    window: int = 0


@dataclass(frozen=True)
class Traffic:
    """``read`` is in bytes, ``operations`` in multiplications and additions.

    ``experts`` and ``experts_per_token`` describe a call that routes, and ``shared_experts`` the
    experts that process every row. ``chosen_tokens`` is the maximum length of a list of this call
    (DSA). All are 0 if they do not apply.
    """

    read: tuple[Term, ...] = ()
    operations: tuple[Term, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    chosen_tokens: int = 0
    shared_experts: int = field(default=0, metadata=of_feature("shared_experts"))
