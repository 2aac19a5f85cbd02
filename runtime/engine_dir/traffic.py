"""What an op call reads of device memory and computes, as numbers that a plan holds.

Counted is what lies in device memory as the kernels read it: every weight once however many rows
there are, the experts that some row chose, and the keys and values that some row sees.
Activations, the step's state and page tables stay in the L2 cache or are too few to matter.
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
    """``amount`` bytes, or multiplications and additions, for every ``per`` of a pass.

    ``pass``: once. ``row``; ``logit_row``: a row whose logits are wanted. ``chosen_expert``: an
    expert that some row chose. ``seen_token``: a token of a sequence that some row of it sees,
    ``row_token_pair``: a row and a token that it sees, both through ``window`` (0: without one).
    ``chosen_token``: a token on the list of a row that attends to chosen ones (DSA).
    """

    part: Part
    amount: int
    per: Per
    window: int = 0


@dataclass(frozen=True)
class Traffic:
    """``read``: bytes; ``operations``: products and sums.

    ``experts`` and ``experts_per_token`` of a call that routes, ``shared_experts``: those beside
    them that every row has; ``chosen_tokens``: the most that a list of this call holds (DSA); 0
    elsewhere.
    """

    read: tuple[Term, ...] = ()
    operations: tuple[Term, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    chosen_tokens: int = 0
    shared_experts: int = field(default=0, metadata=of_feature("shared_experts"))
