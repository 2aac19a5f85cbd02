"""The selection of experts in RmsMoe: attributes, and constants of the kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specbuild.plugins_cuda.launches import LoweringRequest
from specbuild.plugins_cuda.moe.body import GROUP_SCORES
from specbuild.runtime.engine_dir.plan import ExpertGroups
from specbuild.runtime.errors import SpecbuildError

# The index is the number in kernels (scored_choice.cuh).
GATINGS = ("softmax_selected", "softmax_topk", "sigmoid", "sigmoid_norm")
# The gating to whose scores a selection bias is added.
BIASED_GATINGS = ("sigmoid", "sigmoid_norm")
# Inputs of some routers only.
ROUTER_PARTS = ("choice_bias", "router_norm", "expert_scale")
MAX_EXPERTS, MAX_TOP_K, MAX_SHARED, MAX_GROUPS = 512, 10, 2, 32
# With more routed experts besides a shared one, the lists of 256 rows do not fit into the static
# shared memory of a CTA.
MAX_BESIDE_SHARED = 384


@dataclass(frozen=True)
class Choice:
    """A row selects ``top_k`` of ``routed`` experts; ``shared`` experts, the last, apply to all
    rows.

    ``rounded``: the router's logits are rounded to bf16, like a linear layer's output. ``biased``:
    experts are selected by sigmoids plus a bias. ``scaled``: each expert's weight has a factor.
    ``gated``: the weight of a shared expert is the sigmoid of a logit, otherwise 1; the router's
    last rows give these logits. The other fields are those of ``moe.op.route``.
    """

    routed: int
    top_k: int
    gating: str = "softmax_selected"
    rounded: bool = True
    biased: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: str = "sum_of_two"
    scaling: float = 1.0
    shared: int = 0
    scaled: bool = False
    gated: bool = False

    @property
    def router_rows(self) -> int:
        """Return the rows of the router's weight: routed experts, then gates of shared ones."""
        return self.routed + self.shared * self.gated

    @property
    def experts(self) -> int:
        """Return the number of all experts."""
        return self.routed + self.shared

    @property
    def of_a_row(self) -> int:
        """Return the number of experts of a row, including those of all rows."""
        return self.top_k + self.shared

    def rows_of_an_expert(self, rows: int) -> float:
        """Return the average number of ``rows`` per routed expert."""
        return rows * self.top_k / self.routed

    @property
    def scored(self) -> bool:
        """Return whether scored_choice.cuh applies; otherwise rounded_choice.cuh does."""
        return self != Choice(self.routed, self.top_k)

    def logits_bytes(self, rows: int) -> int:
        """Return the bytes of the router's workspace: scores, logits, factors and gates.

        All but the logits are optional.
        """
        return 4 * rows * self.routed * (1 + self.biased + self.scaled + self.gated)

    def of_router(self, rows: int) -> tuple[tuple[str, int], ...]:
        """Return the constants of kernels that write logits."""
        gates = ("SHARED_GATES", self.router_rows - self.routed)
        return ("ROUNDED", int(self.rounded)), gates, *self._places(rows)

    def of_experts(self, rows: int) -> tuple[tuple[str, int | float], ...]:
        """Return the constants of kernels that select experts by logits."""
        if not self.scored:
            return (("SCORED", 0),)
        return (
            ("SCORED", 1),
            ("GATING", GATINGS.index(self.gating)),
            ("GROUPS", self.groups),
            ("GROUPS_CHOSEN", self.groups_chosen),
            ("GROUP_BEST", GROUP_SCORES[self.group_score]),
            ("SCALING", self.scaling),
            ("SHARED_EXPERTS", self.shared),
            *self._places(rows),
        )

    def _places(self, rows: int) -> tuple[tuple[str, int], ...]:
        """Return the values before the logits, the factors and the gates; 0 without these."""
        some = rows * self.routed
        return (
            ("SCORES", some if self.biased else 0),
            ("FACTORS", some * (1 + self.biased) if self.scaled else 0),
            ("GATES", some * (1 + self.biased + self.scaled) if self.gated else 0),
        )


def choice_of(request: LoweringRequest) -> Choice:
    """Return the choice of a request; SpecbuildError if no kernel supports it."""
    attributes, tensors = request.attributes, request.tensors
    shared = int(attributes["shared"])
    choice = Choice(
        routed=tensors["gate_up_bias"].shape[0] - shared,
        top_k=int(attributes["top_k"]),
        gating=str(attributes["gating"]),
        rounded=attributes["logits"] == "rounded",
        biased="choice_bias" in tensors,
        groups=int(attributes["groups"]),
        groups_chosen=int(attributes["groups_chosen"]),
        group_score=str(attributes["group_score"]),
        scaling=float(attributes["scaling"]),
        shared=shared,
        scaled="expert_scale" in tensors,
        gated=bool(attributes["shared_gates"]),
    )
    wrong = unknown_choice(choice)
    if wrong is not None:
        raise SpecbuildError(f"RmsMoe got {wrong}: build this model for the CPU.")
    return choice


def router_parts(request: LoweringRequest) -> tuple[str, ...]:
    """Return the arguments of kernels of routers with additional inputs; empty for other
    routers.
    """
    return ROUTER_PARTS if set(ROUTER_PARTS) & set(request.tensors) else ()


def expert_groups(attributes: Mapping[str, Any]) -> ExpertGroups | None:
    """Return the groups of experts, or None if all experts are candidates."""
    count, chosen = int(attributes["groups"]), int(attributes["groups_chosen"])
    if chosen >= count:
        return None
    return ExpertGroups(count, chosen, GROUP_SCORES[str(attributes["group_score"])])


def unknown_choice(choice: Choice) -> str | None:
    """Return the unsupported and the supported value, or None if the kernels support the choice."""
    known = BIASED_GATINGS if choice.biased else GATINGS
    if choice.gating not in known:
        bias = " with a choice bias" if choice.biased else ""
        return f"gating {choice.gating!r}{bias}, its CUDA kernels know {', '.join(known)}"
    most = min(MAX_TOP_K, choice.routed)
    if not 1 <= choice.top_k <= most or not choice.routed <= MAX_EXPERTS:
        return (
            f"top {choice.top_k} of {choice.routed} experts, its CUDA kernels know 1 to "
            f"{MAX_TOP_K} of up to {MAX_EXPERTS}"
        )
    if not 0 <= choice.shared <= MAX_SHARED:
        return f"{choice.shared} shared experts, its CUDA kernels know up to {MAX_SHARED}"
    return _unknown_groups(choice)


def _unknown_groups(choice: Choice) -> str | None:
    """Return the same for groups."""
    groups, chosen = choice.groups, choice.groups_chosen
    size = choice.routed // groups if groups > 0 and choice.routed % groups == 0 else 0
    best = GROUP_SCORES.get(choice.group_score)
    if best is None:
        return (
            f"group_score {choice.group_score!r}, its CUDA kernels know {', '.join(GROUP_SCORES)}"
        )
    scores = best if chosen < groups else 1
    if not scores <= size or groups > MAX_GROUPS or not 1 <= chosen <= groups:
        return (
            f"{chosen} of {groups} groups of {choice.routed} experts, its CUDA kernels know up to "
            f"{MAX_GROUPS} groups of equal size, of {scores} experts or more"
        )
    if choice.top_k > chosen * size:
        return f"top {choice.top_k} of {chosen} groups of {size} experts, which are fewer"
    return None
