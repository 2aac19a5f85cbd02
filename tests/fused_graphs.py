"""Fuse the CUDA graphs of a checkpoint, and run their nodes with the ops' torch references."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from engine_sizes import compute_engine_sizes

from specbuild.builder import graphs
from specbuild.builder.backends.cuda.backend import CUDA
from specbuild.builder.backends.cuda.fusions.checkpoint_weights import QuantizedWeights
from specbuild.builder.backends.cuda.lowering import cuda_passes
from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.families.checkpoints import read_draft, read_target
from specbuild.builder.graph.passes.pipeline import PassResult, run_passes
from specbuild.builder.graph.passes.weights import Recipe, recipe_of, set_recipe
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.options import BuildOptions
from specbuild.plugins_cuda.linear.block_scaled import decoded, quantised
from specbuild.plugins_cuda.linear.storage import Storage
from specbuild.plugins_cuda.registry import op_named

# Two sequences of the example and trees of 8 nodes: one export serves the tests that fuse it.
EXAMPLE_LIMITS = {
    "max_seq_len": 512, "max_batch_size": 2, "page_size": 16,
    "draft_top_k": 3, "draft_depth": 3, "draft_tokens": 8,
}  # fmt: skip

# The size of a page, and the number of pages of a sequence.
PAGE, PAGES = 16, 8
# The up-projections of a model's own latents.
_NEVER_CODED = "kv_b_proj"


@dataclass(frozen=True)
class FusedModel:
    """A target, optionally with a draft, and their graphs after the CUDA passes."""

    target: TargetCheckpoint
    draft: DraftCheckpoint | None
    engine_sizes: EngineSizes
    models: dict[str, ir.Model]
    results: tuple[PassResult, ...]
    kept: QuantizedWeights


def fused_model(
    target_path: Path,
    draft_path: Path | None = None,
    *,
    draft_only: bool = False,
    **options: Any,
) -> FusedModel:
    """Read, export and fuse a model, or only its draft's graphs; load no weight."""
    target = read_target(target_path, strict=True)
    draft = None if draft_path is None else read_draft(draft_path, target.geometry, strict=True)
    asked = BuildOptions.from_flat(
        model=target_path, draft=draft_path, output=Path("unused"), **options
    )
    g, d = target.geometry, None if draft is None else draft.geometry
    engine_sizes = compute_engine_sizes(asked, g, d)
    sources = WeightSources(target, [] if draft is None else [draft], CUDA.activations)
    dtype = sources.activations
    models = {}
    if not draft_only:
        models["target"] = graphs.target_graph(g, engine_sizes, d.aux_layers if d else (), dtype)
    if d is not None:
        models["draft_fuse"] = graphs.draft_fuse_graph(d, g, engine_sizes, dtype)
        models["draft"] = graphs.draft_graph(d, g, engine_sizes, dtype)
    results, kept = [], QuantizedWeights()
    codes = asked.kernels.weights_dtype in (None, "checkpoint")
    for role, model in models.items():
        sources.bind(model)
        passes = cuda_passes(
            role,
            draft_dtype=asked.drafting.dtype or "bf16",
            weights_dtype=asked.kernels.weights_dtype or "bf16",
            tied=g.tied_head,
            quantized=kept if codes else None,
            ranks=engine_sizes.ranks,
        )
        results += run_passes(role, model, passes, asked.dump_passes)
    return FusedModel(target, draft, engine_sizes, models, tuple(results), kept)


def run_graph(model: ir.Model, feeds: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a graph by name. Every node runs the reference of its op.

    AssertionError if a feed or a result has another type or shape than the graph declares.
    """
    values: dict[ir.Value, torch.Tensor] = {}
    sizes: dict[str, int] = {}
    for port in model.graph.inputs:
        values[port] = feeds[port.name or ""]
        _check(port, values[port], sizes)
    for weight in model.graph.initializers.values():
        recipe = recipe_of(weight)
        assert recipe is not None
        values[weight] = recipe.checked()
    for node in model.graph:
        made = _call(node, values)
        for value, tensor in zip(node.outputs, made, strict=True):
            _check(value, tensor, sizes)
            values[value] = tensor
    return {output.name or "": values[output] for output in model.graph.outputs}


def round_weights(model: ir.Model, storage: Storage) -> None:
    """Round packed bf16 weights to their quantized values, except those never quantized."""
    for name, value in model.graph.initializers.items():
        recipe = recipe_of(value)
        if recipe is None or not name.endswith(".packed") or _NEVER_CODED in name:
            continue

        def rounded(recipe: Recipe = recipe) -> torch.Tensor:
            return decoded(quantised(recipe.load(), storage), 32 * recipe.shape[1])

        set_recipe(value, replace(recipe, load=rounded))


def _call(node: ir.Node, values: Mapping[ir.Value, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    op = op_named(node.op_type)
    arguments = []
    for spec, value in zip_longest(op.inputs, node.inputs):
        tensor = None if value is None else values[value]
        # Rows are contiguous: an op that names fewer axes sees the trailing ones joined.
        if tensor is not None and not spec.rank_free and tensor.ndim > len(spec.axes):
            tensor = tensor.flatten(len(spec.axes) - 1)
        arguments.append(tensor)
    given = {name: attribute.value for name, attribute in node.attributes.items()}
    result = op.reference(*arguments, **op.complete(given))
    return result if isinstance(result, tuple) else (result,)


def _check(value: ir.Value, tensor: torch.Tensor, sizes: dict[str, int]) -> None:
    assert value.shape is not None and value.dtype is not None, f"{value.name} is untyped"
    wanted = [
        size if isinstance(size, int) else sizes.setdefault(str(size.value), got)
        for size, got in zip(value.shape, tensor.shape, strict=True)
    ]
    dtype = str(tensor.dtype).removeprefix("torch.").replace("float32", "float")
    assert (list(tensor.shape), dtype) == (wanted, value.dtype.name.lower()), value.name


def sequence(rows: range, page_size: int, pages: int) -> dict[str, torch.Tensor]:
    """Return the ports of a group's view for the rows of one sequence.

    The pages of the table are in descending order.
    """
    ids = torch.arange(rows.start, rows.stop, dtype=torch.int32)
    table = torch.arange(pages - 1, 0, -1, dtype=torch.int32)
    return {
        "page_table": table.view(1, 1, -1),
        "row_slot": ids,
        "tree_start": torch.tensor([rows.stop], dtype=torch.int32),
        "write_slot": table[ids // page_size] * page_size + ids % page_size,
    }


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return ‖actual − expected‖ / ‖expected‖ of every row."""
    difference = (actual.float() - expected.float()).norm(dim=-1)
    return difference / expected.float().norm(dim=-1).clamp(min=math.ulp(1.0))


def blank_pools(model: ir.Model) -> dict[str, torch.Tensor]:
    """Return pools filled with NaN, by port name."""
    pools = {}
    for port in model.graph.inputs:
        if port.name and port.name.endswith("_pool"):
            pools[port.name] = torch.full(list(port.shape), float("nan")).bfloat16()
    return pools


def launch_feeds(model: ir.Model, rows: range, logit_rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the ports of one sequence's rows, with the same view for every group."""
    positions = torch.arange(rows.start, rows.stop, dtype=torch.int32)
    feeds = {
        "positions": positions,
        "row_start": torch.tensor([0, len(rows)], dtype=torch.int32),
        "ancestor_bits": torch.zeros(len(rows), 1, dtype=torch.int32),
        "logit_rows": logit_rows.int(),
    }
    view = sequence(rows, PAGE, PAGES)
    for port in model.graph.inputs:
        group, _, name = (port.name or "").rpartition(".")
        if group and name in view:
            feeds[port.name] = view[name]
    return feeds


def logits_in_chunks(model: ir.Model, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits of 60 rows, from launches that split pages; one has a single row."""
    pools, logits = blank_pools(model), []
    for rows in (range(33), range(33, 34), range(34, 60)):
        feeds = launch_feeds(model, rows, torch.arange(len(rows))) | pools
        feeds["token_ids"] = ids[rows.start : rows.stop].int()
        outputs = run_graph(model, feeds)
        pools = kept_pools(outputs)
        logits.append(outputs["logits"])
    return torch.cat(logits)


def require_rounding_only(
    logits: torch.Tensor, theirs: torch.nn.Module, ids: torch.Tensor, *, tolerance: float
) -> None:
    """Require that ``logits`` differ from ``theirs`` in fp32 about as much as bf16 does.

    ``theirs`` in bf16 gives the allowed difference. ``tolerance`` limits the median of the
    relative error of bf16.
    """
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        # The parameters only: positions times rounded frequencies would be other positions.
        for parameter in theirs.parameters():
            parameter.data = parameter.data.bfloat16()
        in_bf16 = theirs(ids[None]).logits[0]
    error, of_bf16 = (relative_error(x, expected) for x in (logits, in_bf16))
    assert of_bf16.median() < tolerance
    assert error.median() < 1.2 * of_bf16.median()
    assert error.max() < 2 * of_bf16.max()


def kept_pools(outputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {n.removesuffix(".out"): v for n, v in outputs.items() if n.endswith(".out")}
