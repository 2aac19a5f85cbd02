"""The target's head by vocabulary: each of several ranks has an equal share of its tokens."""

from __future__ import annotations

from functools import partial

import onnx_ir as ir

from specbuild.builder.backends.cuda.shard.split import by_rows
from specbuild.builder.backends.cuda.shard.target import EXCHANGE
from specbuild.builder.backends.cuda.step.fused_graph import Placement
from specbuild.builder.backends.cuda.step.ir import Tensor
from specbuild.builder.graph.passes.weights import recipe_of, sharded_recipe


def shared_head(placement: Placement, weight: ir.Value) -> dict[str, Tensor] | None:
    """The inputs of RankHeadChoose that HeadChoose has otherwise, or not at all.

    ``weight`` [tiles of 16 tokens, …] is the packed vocabulary. Programs that write logits read all
    of it, so it is stored beside the shares. None on one rank, and where ranks cannot share tiles.
    """
    inbox = placement.ports.get(EXCHANGE["inbox"])
    recipe = recipe_of(weight)
    if inbox is None or recipe is None:
        return None
    ranks = inbox.shape[1] + 1
    if recipe.shape[0] % ranks:
        return None
    shares = sharded_recipe(recipe, ranks, partial(by_rows, ranks=ranks))
    exchange = {name: placement.ports[port] for name, port in EXCHANGE.items()}
    return {"weight": placement.weights.tensor(f"{weight.name}.sharded", shares), **exchange}
