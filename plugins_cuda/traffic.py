"""The traffic of ops: the bytes that a call reads and the operations that it computes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.plugins_cuda.linear.packing import TILE_ROWS
from specbuild.runtime.engine_dir.plan import ExpertGroups
from specbuild.runtime.engine_dir.traffic import Term, Traffic


@dataclass(frozen=True)
class TrafficRequest:
    """A call for which the traffic is computed.

    ``tensors`` holds every present input and output by its declared name; those in ``stored`` are
    weights of the engine.
    """

    tensors: Mapping[str, TensorInfo]
    attributes: Mapping[str, Any]
    stored: Collection[str]


TrafficOf: TypeAlias = Callable[[TrafficRequest], Traffic]


@dataclass(frozen=True)
class NoTraffic:
    """The declaration of an op with negligible traffic, for ``reason``."""

    reason: str


# For ops that update the state of a step, or derive the rows of its next part from the state.
STATE_ONLY = NoTraffic("reads the state of a step's sequences, which stays in the L2 cache")


@dataclass(frozen=True)
class Weights:
    """The traffic of an op that reads its stored tensors once per pass, and no cache.

    ``looked_up``: tensors of which every row reads one entry of the first axis, or one of the 16
    rows of a tile there. ``multiplied``: weights that multiply ``x`` [T, K], of shape [N, K] or
    packed in tiles of 16 outputs, in any format. A ``head`` multiplies only the rows whose logits
    are required.
    """

    multiplied: tuple[str, ...] = ()
    looked_up: tuple[str, ...] = ()
    part: Literal["dense", "head"] = "dense"

    def __call__(self, request: TrafficRequest) -> Traffic:
        """Return the traffic of a call."""
        return Traffic(
            read=stored_terms(request, looked_up=self.looked_up, part=self.part),
            operations=product_terms(request, self.multiplied, part=self.part),
        )


@dataclass(frozen=True)
class Routing:
    """The place of an op's router logits after a launch has written them.

    ``logits``: a tensor or workspace, fp32 [rows of x, experts]. It is first an argument of the
    launch that writes it. A row selects the experts with the largest logits; the op's traffic gives
    their number. ``row_start``: the input whose last entry is the number of valid rows.
    ``groups``: the groups of a call's experts, by its attributes.
    """

    logits: str
    row_start: str
    groups: Callable[[Mapping[str, Any]], ExpertGroups | None]


def stored_terms(
    request: TrafficRequest,
    *,
    looked_up: Collection[str] = (),
    besides: Collection[str] = (),
    part: Literal["dense", "head"] = "dense",
) -> tuple[Term, ...]:
    """Return the bytes of stored tensors.

    A tensor counts completely, or one entry per row if it is in ``looked_up``. Those in
    ``besides`` do not count.
    """
    whole = entries = 0
    for name in request.stored:
        info = request.tensors[name]
        if name in looked_up:
            rows = info.shape[0] * (TILE_ROWS if len(info.shape) == 3 else 1)
            entries += info.nbytes // rows
        elif name not in besides:
            whole += info.nbytes
    return terms(Term(part, whole, "pass"), Term(part, entries, "row"))


def product_terms(
    request: TrafficRequest,
    weights: Collection[str],
    *,
    part: Literal["dense", "head"] = "dense",
) -> tuple[Term, ...]:
    """Return a product and a sum for every weight element and row; see :class:`Weights`."""
    total = 0
    for name in weights:
        shape = request.tensors[name].shape
        outputs = shape[0] if len(shape) == 2 else TILE_ROWS * shape[0]
        total += 2 * outputs * request.tensors["x"].shape[1]
    return terms(Term(part, total, "logit_row" if part == "head" else "row"))


def cache_term(amount: int, per: Literal["seen_token", "row_token_pair"], window: int) -> Term:
    """Return the traffic of a cache with this sliding window; 0 means no window."""
    return Term("kv_sliding" if window else "kv_full", amount, per, window)


def terms(*some: Term) -> tuple[Term, ...]:
    """Return the terms that are not 0."""
    return tuple(term for term in some if term.amount)
