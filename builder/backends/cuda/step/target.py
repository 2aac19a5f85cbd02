"""The target in a program: its layers over some rows, and the choice of tokens from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specbuild.builder.backends.cuda.step.engine_parts import LIST_LIMITS, EngineParts
from specbuild.builder.backends.cuda.step.fused_graph import (
    Placement,
    WeightTensors,
    attributes_of,
)
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.recurrent_states import state_inputs
from specbuild.builder.backends.cuda.step.state import EXCHANGE, PARTIAL_TABLE
from specbuild.builder.graph.passes.weights import Recipe, derived, recipe_of, sharded_recipe
from specbuild.plugins_cuda.head_screen.lowering import MAX_ROWS as MAX_PREFILTER_ROWS
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP
from specbuild.runtime.sampling import CHOOSE_INPUTS

_BLANK = "captured_blank"
# The rows whose logits are written: none, those with top-k, top-p or min-p, or all.
WrittenLogits = Literal["none", "cut", "all"]
# The sampling parameters of a row: Choose's inputs without the logits.
SAMPLING = (*CHOOSE_INPUTS, "position")
# The index of the packed vocabulary among a head's inputs.
_WEIGHT = 3
# Inputs that a head which writes no logits does not have.
_CUTS = ("top_k", "top_p", "floor")
# The tensors of the int8 form of a head.
_PREFILTER = {"codes": screened, "errors": screen_errors}


@dataclass(frozen=True)
class TargetViews:
    """The views that full-attention layers read instead of the full cache (SpecPV).

    ``tables`` is [layers, B, kv_heads, P]. For latents, ``positions`` [layers, B, P] has those of
    their pages. ``inputs`` has graph inputs by their names after the group's: ``row_slot`` and
    ``tree_start`` in the views, and, if the program ``selects_blocks``, what is summarized and
    selected.
    """

    tables: Tensor
    positions: Tensor | None
    inputs: Mapping[str, Tensor]
    selects_blocks: bool


@dataclass(frozen=True)
class TargetRows:
    """The rows of one pass: tensors by the names of the graph's inputs, ``logit_rows`` [R].

    ``budget`` [B] limits the tokens that each sequence's rows attend to; None is full attention.
    With ``stores`` recurrent states include the rows. ``row_count`` [B] is the number of rows of
    each sequence in a ragged step, else None.
    """

    batch: int
    rows: int
    inputs: Mapping[str, Tensor]
    write_slots: Mapping[str, Tensor]
    views: TargetViews | None = None
    budget: Tensor | None = None
    stores: bool = False
    row_count: Tensor | None = None

    @property
    def logit_rows(self) -> int:
        """The number of rows with logits, R."""
        return self.inputs["logit_rows"].shape[0]


@dataclass(frozen=True)
class TargetPass:
    """A target in a program; ``aux_hidden`` [T, C] exists if there is a draft.

    ``violations`` [layers, B] counts the invalid lists of a sparse pass.
    """

    placement: Placement
    aux_hidden: Tensor | None
    violations: Tensor | None = None


def run_target(
    parts: EngineParts,
    program: ProgramIr,
    rows: TargetRows,
    aux_hidden: Tensor | None = None,
    *,
    bare: bool = False,
) -> TargetPass:
    """Add all layers up to the head. ``aux_hidden`` receives the captured states, else scratch.

    A ``bare`` pass captures no states and selects no views.
    """
    inputs = {**rows.inputs, **state_inputs(parts, rows.batch)}
    for group in parts.target_groups:
        table = parts.page_table(group, rows.batch)
        inputs |= {
            f"{group}.page_table": table.view(rows.batch, 1, table.shape[1]),
            f"{group}.row_slot": rows.inputs["row_slot"],
            f"{group}.tree_start": rows.inputs["tree_start"],
            f"{group}.write_slot": rows.write_slots[group],
        }
    if parts.views is not None:
        inputs |= _full_layers(parts, rows)
    if rows.budget is not None:
        inputs[LIST_LIMITS] = rows.budget
    graph = parts.graphs["target"]
    output = None if bare else graph.output("captured")
    if output is not None:
        info = TensorInfo((rows.rows, parts.ports.sizes.aux_width), "bfloat16")
        inputs[_BLANK] = aux_hidden or program.scratch("captured", info)
    placement = parts.placement(
        "target",
        program,
        inputs,
        rows=rows.rows,
        logit_rows=rows.logit_rows,
        stores=rows.stores,
    )
    assert graph.head is not None
    hidden = graph.head.inputs[0]
    assert hidden is not None
    selects_blocks = rows.views is not None and rows.views.selects_blocks and not bare
    selections = graph.selection_outputs if selects_blocks else []
    counts = graph.violations if rows.budget is not None else []
    violations = None
    if counts:
        info = TensorInfo((len(counts), rows.batch), "int32")
        violations = program.scratch("violations", info)
        for i, count in enumerate(counts):
            placement.set_output(count, violations.part(i))
    outputs = [*graph.pools, hidden, *selections, *counts]
    placement.place([*outputs, *([output] if output is not None else [])])
    return TargetPass(placement, placement.value(output), violations)


def _full_layers(parts: EngineParts, rows: TargetRows) -> dict[str, Tensor]:
    """Return the page table of each full-attention layer, and the inputs of views if any."""
    group = parts.view_group
    layers = len(parts.layouts[group].group.layers)
    if rows.views is None:
        table = parts.page_table(group, rows.batch)
        full_table = table.view(rows.batch, 1, table.shape[1])
        return parts.layer_inputs("page_table", [full_table] * layers, group)
    views = rows.views
    tables = [views.tables.part(i) for i in range(layers)]
    positions = [] if views.positions is None else [views.positions.part(i) for i in range(layers)]
    partial = [parts.ports.first(f"{PARTIAL_TABLE}.{i}", rows.batch) for i in range(layers)]
    return {
        **_indexers(parts, views),
        **parts.layer_inputs("page_table", tables, group),
        **parts.layer_inputs("page_position", positions, group),
        **parts.layer_inputs("partial_table", partial, parts.block_group),
        **{f"{group}.{name}": tensor for name, tensor in views.inputs.items()},
        **{f"{parts.block_group}.{name}": tensor for name, tensor in views.inputs.items()},
    }


def _indexers(parts: EngineParts, views: TargetViews) -> dict[str, Tensor]:
    """Return the inputs of indexers, which select tokens from the views of their layers."""
    if INDEXER_GROUP not in parts.layouts:
        return {}
    view_layers = parts.layouts[parts.view_group].group.layers
    indices = [view_layers.index(layer) for layer in parts.layouts[INDEXER_GROUP].group.layers]
    tables = [views.tables.part(index) for index in indices]
    return {
        **parts.layer_inputs("page_table", tables, INDEXER_GROUP),
        **{f"{INDEXER_GROUP}.{n}": views.inputs[n] for n in ("row_slot", "tree_start")},
    }


def logits(placement: Placement, outputs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Call the head and return logits [R, V] in fp32."""
    head = placement.graph.head
    assert head is not None
    program = placement.program
    outputs = outputs or {"logits": program.scratch("logits", placement.info(head.outputs[0]))}
    arguments = placement.arguments(head)
    return program.call(head.op_type, arguments, attributes_of(head), outputs=outputs)["logits"]


def choose(
    placement: Placement,
    sampling: Mapping[str, Tensor],
    written: WrittenLogits,
    outputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return the target's ``choice`` [R] and ``logprob`` [R].

    ``sampling`` has the tensors [R] of ``SAMPLING``, among others. ``written`` selects the rows
    whose logits are written. With "none" the inputs for top-k, top-p and min-p are omitted. With
    "all" the logits can be written to ``outputs``. A prefiltered head returns an infinite
    log-probability. Several ranks share the tokens of a head whose logits are not written.
    """
    head = placement.graph.head
    assert head is not None
    program = placement.program
    if written == "all":
        parameters = {name: sampling[name] for name in SAMPLING}
        logit_output = {
            name: tensor for name, tensor in (outputs or {}).items() if name == "logits"
        }
        choose_inputs = {"logits": logits(placement, logit_output), **parameters}
        return program.call("Choose", choose_inputs, outputs=outputs)
    inputs = placement.arguments(head) | {
        name: sampling[name] for name in SAMPLING if name not in _CUTS
    }
    if written == "cut":
        return _choose_cut(placement, inputs, {name: sampling[name] for name in SAMPLING})
    weight = head.inputs[_WEIGHT]
    assert weight is not None
    uses_prefilter = placement.prefilter_head and sampling["seed"].shape[0] <= MAX_PREFILTER_ROWS
    name, attributes = "HeadScreen" if uses_prefilter else "HeadChoose", attributes_of(head)
    stored_name, recipe = weight.name, recipe_of(weight)
    shards = _shards(placement, recipe)
    if shards is not None:
        name, stored_name, recipe = f"Rank{name}", f"{stored_name}.sharded", shards
        inputs |= {"weight": placement.weights.tensor(stored_name, shards)}
        inputs |= {end: placement.ports[port] for end, port in EXCHANGE.items()}
        attributes |= {"ranks": shards.ranks, "exchange": 0}
    if uses_prefilter:
        assert stored_name is not None
        assert recipe is not None
        inputs |= prefilter_tensors(placement.weights, stored_name, recipe)
    return program.call(name, inputs, attributes, outputs=outputs)


def prefilter_tensors(weights: WeightTensors, name: str, recipe: Recipe) -> dict[str, Tensor]:
    """Return the int8 form of a packed bf16 head: HeadScreen's ``codes`` and ``errors``.

    They are stored as additional weights after ``name``. A sharded weight has them per rank.
    """
    return {
        kind: weights.tensor(f"{name}.{kind}", derived([recipe], form))
        for kind, form in _PREFILTER.items()
    }


def _shards(placement: Placement, recipe: Recipe | None) -> Recipe | None:
    """Return the ranks' shares of a packed vocabulary [tiles of 16 tokens, …].

    Programs that write logits read the full vocabulary, which is stored in addition. Returns None
    on one rank, and if ranks cannot share tiles.
    """
    inbox = placement.ports.get(EXCHANGE["inbox"])
    if inbox is None or recipe is None:
        return None
    ranks = inbox.shape[1] + 1
    if recipe.shape[0] % ranks:
        return None
    return sharded_recipe(recipe, ranks, lambda packed: packed.unflatten(0, (ranks, -1)))


def _choose_cut(
    placement: Placement, inputs: Mapping[str, Tensor | None], sampling: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Choose again from the logits of rows with top-k, top-p or min-p."""
    head, program = placement.graph.head, placement.program
    assert head is not None
    written = program.scratch("kept", placement.info(head.outputs[0]))
    cuts = {name: sampling[name] for name in _CUTS}
    chosen = program.call("HeadKeep", {**inputs, **cuts, "kept": written}, attributes_of(head))
    uncut = {f"uncut_{name}": chosen[name] for name in ("choice", "logprob")}
    return program.call("ChooseCut", {"logits": written, **sampling, **uncut})
