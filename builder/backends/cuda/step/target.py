"""The target in a program: its layers over some rows, and what is chosen from its logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from specbuild.builder.backends.cuda.step.engine_parts import LISTS_ASKED, EngineParts
from specbuild.builder.backends.cuda.step.fused_graph import (
    HEAD,
    Placement,
    WeightTensors,
    attributes_of,
)
from specbuild.builder.backends.cuda.step.ir import ProgramIr, Tensor
from specbuild.builder.backends.cuda.step.state import EXCHANGE, PARTIAL_TABLE
from specbuild.builder.backends.cuda.step.states import state_inputs
from specbuild.builder.graph.passes.weights import Recipe, derived, recipe_of, sharded_recipe
from specbuild.plugins_cuda.head_screen.lowering import MAX_ROWS as MAX_SCREENED_ROWS
from specbuild.plugins_cuda.head_screen.screen import screen_errors, screened
from specbuild.plugins_cuda.launches import TensorInfo
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP
from specbuild.runtime.sampling import CHOOSE_INPUTS

# The tensors of a screened head, which are derived from its packed weight.
_SCREEN_TENSORS = {"codes": screened, "errors": screen_errors}

_BLANK = "captured_blank"
# Whose logits are written: no row's, those of rows that top-k, top-p or min-p cut, all rows'.
KeptLogits = Literal["none", "cut", "all"]
# How a row chooses: Choose's inputs beside the logits.
SAMPLING = (*CHOOSE_INPUTS, "position")
# Where the packed vocabulary stands among a head's inputs.
_WEIGHT = 3
# What a head that keeps no logits leaves out.
_CUTS = ("top_k", "top_p", "floor")


@dataclass(frozen=True)
class TargetViews:
    """What full-attention layers see instead of everything (SpecPV).

    ``tables`` [layers, B, kv_heads, P], and of latents ``positions`` [layers, B, P] of their pages;
    ``inputs`` by the names of the graph's inputs behind the group's: ``row_slot`` and
    ``tree_start`` in the views, and what is summarised and chosen, where the program ``chooses``
    views.
    """

    tables: Tensor
    positions: Tensor | None
    inputs: Mapping[str, Tensor]
    chooses: bool


@dataclass(frozen=True)
class TargetRows:
    """The rows of one pass: tensors by the names of the graph's inputs, ``logit_rows`` [R].

    ``budget`` [B]: how many tokens each sequence's rows may choose; None where they attend to
    everything. ``stores``: recurrent states take the rows in. ``row_count`` [B]: how many rows each
    sequence has; None where it says nothing.
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
        """R."""
        return self.inputs["logit_rows"].shape[0]


@dataclass(frozen=True)
class TargetPass:
    """A placed target; ``aux_hidden`` [T, C] where there is a draft.

    ``violations`` [layers, B] of a sparse pass: its broken lists.
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
    """All layers, up to the head. ``aux_hidden`` is where the draft's features go; else scratch.

    A ``bare`` pass keeps no features and chooses no views.
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
        inputs[LISTS_ASKED] = rows.budget
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
    chooses = rows.views is not None and rows.views.chooses and not bare
    chosen = graph.chosen if chooses else []
    counts = graph.violations if rows.budget is not None else []
    violations = None
    if counts:
        info = TensorInfo((len(counts), rows.batch), "int32")
        violations = program.scratch("violations", info)
        for i, count in enumerate(counts):
            placement.put(count, violations.part(i))
    wanted = [*graph.pools, hidden, *chosen, *counts]
    placement.place([*wanted, *([output] if output is not None else [])])
    return TargetPass(placement, placement.value(output), violations)


def _full_layers(parts: EngineParts, rows: TargetRows) -> dict[str, Tensor]:
    """The page table of each full-attention layer, and the inputs of views where there are any."""
    group = parts.viewed
    layers = len(parts.layouts[group].group.layers)
    if rows.views is None:
        table = parts.page_table(group, rows.batch)
        whole = table.view(rows.batch, 1, table.shape[1])
        return parts.layer_inputs("page_table", [whole] * layers, group)
    views = rows.views
    tables = [views.tables.part(i) for i in range(layers)]
    positions = [] if views.positions is None else [views.positions.part(i) for i in range(layers)]
    partial = [parts.ports.first(f"{PARTIAL_TABLE}.{i}", rows.batch) for i in range(layers)]
    return {
        **_indexers(parts, views),
        **parts.layer_inputs("page_table", tables, group),
        **parts.layer_inputs("page_position", positions, group),
        **parts.layer_inputs("partial_table", partial, parts.chooser),
        **{f"{group}.{name}": tensor for name, tensor in views.inputs.items()},
        **{f"{parts.chooser}.{name}": tensor for name, tensor in views.inputs.items()},
    }


def _indexers(parts: EngineParts, views: TargetViews) -> dict[str, Tensor]:
    """Indexers choose among what their layers see: the pages of a view are those of their keys."""
    if INDEXER_GROUP not in parts.layouts:
        return {}
    of_views = parts.layouts[parts.viewed].group.layers
    places = [of_views.index(layer) for layer in parts.layouts[INDEXER_GROUP].group.layers]
    tables = [views.tables.part(place) for place in places]
    return {
        **parts.layer_inputs("page_table", tables, INDEXER_GROUP),
        **{f"{INDEXER_GROUP}.{n}": views.inputs[n] for n in ("row_slot", "tree_start")},
    }


def logits(placement: Placement, outputs: Mapping[str, Tensor] | None = None) -> Tensor:
    """Calls a placed graph's head: logits [R, V] in fp32."""
    head = placement.graph.head
    assert head is not None
    program = placement.program
    outputs = outputs or {"logits": program.scratch("logits", placement.info(head.outputs[0]))}
    arguments = placement.arguments(head)
    return program.call(HEAD, arguments, attributes_of(head), outputs=outputs)["logits"]


def choose(
    placement: Placement,
    sampling: Mapping[str, Tensor],
    kept: KeptLogits,
    outputs: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The target's ``choice`` [R] and ``logprob`` [R].

    ``sampling`` has the tensors [R] of ``SAMPLING``, among others. ``kept``: whose logits are
    written. Where no row's are, what cuts is left out; where all are, they may lie where
    ``outputs`` says. A screened head gives no log-probability: it is infinite there. Several ranks
    share the tokens of a head whose logits are not written.
    """
    head = placement.graph.head
    assert head is not None
    program = placement.program
    if kept == "all":
        wanted = {name: sampling[name] for name in SAMPLING}
        place = {name: tensor for name, tensor in (outputs or {}).items() if name == "logits"}
        given = {"logits": logits(placement, place), **wanted}
        return program.call("Choose", given, outputs=outputs)
    inputs = placement.arguments(head) | {
        name: sampling[name] for name in SAMPLING if name not in _CUTS
    }
    if kept == "cut":
        return _choose_cut(placement, inputs, {name: sampling[name] for name in SAMPLING})
    weight = head.inputs[_WEIGHT]
    assert weight is not None
    prefilter_head = placement.prefilter_head and sampling["seed"].shape[0] <= MAX_SCREENED_ROWS
    name, attributes = "HeadScreen" if prefilter_head else "HeadChoose", attributes_of(head)
    stored, recipe = weight.name, recipe_of(weight)
    shares = _shares(placement, recipe)
    if shares is not None:
        name, stored, recipe = f"Rank{name}", f"{stored}.sharded", shares
        inputs |= {"weight": placement.weights.tensor(stored, shares)}
        inputs |= {end: placement.ports[port] for end, port in EXCHANGE.items()}
        attributes |= {"ranks": shares.ranks, "exchange": 0}
    if prefilter_head:
        assert stored is not None
        assert recipe is not None
        inputs |= screen_tensors(placement.weights, stored, recipe)
    return program.call(name, inputs, attributes, outputs=outputs)


def _shares(placement: Placement, recipe: Recipe | None) -> Recipe | None:
    """The shares of a packed vocabulary [tiles of 16 tokens, …] that ranks have.

    Programs that write logits read all of it, so it is stored beside the shares. None on one rank,
    and where ranks cannot share tiles.
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
    """Rows that top-k, top-p or min-p cut choose once more, from their logits."""
    head, program = placement.graph.head, placement.program
    assert head is not None
    place = program.scratch("kept", placement.info(head.outputs[0]))
    cuts = {name: sampling[name] for name in _CUTS}
    chosen = program.call("HeadKeep", {**inputs, **cuts, "kept": place}, attributes_of(head))
    uncut = {f"uncut_{name}": chosen[name] for name in ("choice", "logprob")}
    return program.call("ChooseCut", {"logits": place, **sampling, **uncut})


def screen_tensors(weights: WeightTensors, name: str, recipe: Recipe) -> dict[str, Tensor]:
    """HeadScreen's ``codes`` and ``errors`` of the packed bf16 weight ``name``, stored beside it.

    Of a weight whose tiles ranks share, each has those of its own.
    """
    return {
        kind: weights.tensor(f"{name}.{kind}", derived([recipe], form))
        for kind, form in _SCREEN_TENSORS.items()
    }
