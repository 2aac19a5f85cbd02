"""The graphs of an engine, by role, in portable form: exported modules and single ops."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import nn

from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.families.parts.graph_io import (
    LAUNCH_PORTS,
    BlockView,
    GroupView,
    InputPort,
    Launch,
    block_ports,
    budget_port,
    layer_pools,
    layer_view,
    output_name,
    path_ports,
    pool_ports,
    state_inputs_port,
    state_ports,
    summary_port,
    view_ports,
)
from specbuild.builder.families.parts.target import GraphSizes
from specbuild.builder.families.registry import draft_family, target_family
from specbuild.builder.graph.export import GraphDeclaration, export_module
from specbuild.builder.graph.passes.cleanup import clear_metadata
from specbuild.builder.graph.repeated_blocks import BlockPorts, block_outputs, call_blocks
from specbuild.builder.graph.weight_sources import WeightSources
from specbuild.builder.op_graphs import (
    accept_graph,
    choose_graph,
    commit_graph,
    expand_graph,
    select_graph,
)
from specbuild.builder.progress import Progress
from specbuild.runtime.engine_dir.drafters.record import (
    DRAFT_GROUP,
    DRAFT_MODEL_ROLES,
    DraftGeometry,
    aux_layers_of,
    own_name,
)
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, CacheGroup, StateGroup

_HEAD = 1 + len(LAUNCH_PORTS)


def export_graphs(
    sources: WeightSources, engine_sizes: EngineSizes, progress: Progress
) -> dict[str, ir.Model]:
    """Return the portable graph of every role, with weights bound to the checkpoints."""
    g, dtype = sources.target_geometry, sources.activations
    aux_layers = aux_layers_of([draft.geometry for draft in sources.drafts.values()])
    progress.start("exporting graphs", 1 + len(DRAFT_MODEL_ROLES) * len(sources.drafts), "graph")
    models = {"target": target_graph(g, engine_sizes, aux_layers, dtype)}
    sources.bind(models["target"])
    progress.advance(1)
    for group in sources.drafts:
        models |= _drafting_graphs(sources, engine_sizes, group, progress)
    verifies = engine_sizes.limits.draft_tokens > 0
    if verifies:
        models["commit"] = commit_graph(g, engine_sizes.target_groups, engine_sizes.states, dtype)
        sources.bind(models["commit"])
    models["choose"] = choose_graph(g.vocab)
    if verifies:
        models["accept"] = accept_graph(engine_sizes.limits.draft_depth)
    for model in models.values():
        clear_metadata(model)
    return models


def _drafting_graphs(
    sources: WeightSources, engine_sizes: EngineSizes, group: str, progress: Progress
) -> dict[str, ir.Model]:
    """Return the graphs of the draft with this cache group, by the engine's names of its roles."""
    d, models = sources.drafts[group].geometry, {}
    for role, make in zip(DRAFT_MODEL_ROLES, (draft_fuse_graph, draft_graph), strict=True):
        models[role] = make(d, sources.target_geometry, engine_sizes, sources.activations, group)
        sources.bind(models[role], group)
        progress.advance(1)
    models["expand"] = expand_graph(d, sources, group)
    models["select"] = select_graph(engine_sizes.limits.draft_depth)
    return {own_name(group, role): model for role, model in models.items()}


def target_graph(
    g: TargetGeometry,
    engine_sizes: EngineSizes,
    aux_layers: tuple[int, ...],
    activations: torch.dtype,
) -> ir.Model:
    """Return the role ``target``, with activations of this type."""
    with torch.device("meta"):
        longest = _table_length(engine_sizes, engine_sizes.limits.draft_tokens + 1)
        sizes = GraphSizes(
            aux_layers,
            longest,
            engine_sizes.views,
            engine_sizes.dsa,
            longest=engine_sizes.limits.max_seq_len,
        )
        module = target_family(g.model_type).module(g, sizes)
    module.to(activations)
    group_of_layer = engine_sizes.group_of_layer(g)
    groups = engine_sizes.layer_groups
    block_inputs, summaries = _block_ports(engine_sizes, activations)
    of_layers = [
        _cache_ports(groups[group], g.cache_layer(layer), activations)
        for layer, group in enumerate(group_of_layer)
    ]
    rows = [
        _row_outputs(groups[group], layer, activations)
        for layer, group in enumerate(group_of_layer)
    ]
    per_head = engine_sizes.choosing_group.kv_heads if block_inputs else None
    of_groups = [
        path_ports(group)
        if isinstance(group, StateGroup)
        else view_ports(
            group,
            batch_axis(engine_sizes),
            views=None if group.window else per_head,
            rotated_when_read=module.rotates_when_read and bool(group.latent_widths),
        )
        for group in groups
    ]
    budget, keys, broken = _index_ports(engine_sizes, activations)
    caches = of_layers[: len(g.caching_layers)]
    pools = [port for ports in caches for port in ports]
    views = [port for ports in of_groups for port in ports]
    extra_ports = [*summaries, *block_inputs[-1:], *keys]
    given = [
        output
        for ports, outputs in zip(caches, rows, strict=False)
        for output in (*[replace(p, name=output_name(p.name)) for p in ports], *outputs)
    ]
    aux_hidden = len(aux_layers) * g.hidden
    declaration = GraphDeclaration(
        role="target",
        inputs=(
            InputPort("token_ids", torch.int32, ("T",)),
            *launch_ports(engine_sizes),
            *views,
            *pools,
            *block_inputs,
            *summaries,
            *budget,
            *keys,
        ),
        outputs=(
            "logits",
            *(["captured"] if aux_layers else []),
            *[port.name for port in given],
            *[output_name(p.name) for p in extra_ports],
            *[port.name for port in broken],
        ),
        output_shapes=(
            ("R", g.vocab),
            *([("T", aux_hidden)] if aux_layers else []),
            *[port.shape for port in (*given, *extra_ports, *broken)],
        ),
        stages=(*[f"stage.layer.{i}" for i in range(g.layers)], "stage.pre_head"),
    )

    def pack(values: Sequence[Any]) -> tuple[Any, ...]:
        rest = iter(values[_HEAD:])
        split = [[next(rest) for _ in ports] for ports in of_groups]
        arguments: tuple[Any, ...] = (
            values[0],
            Launch(*values[1:_HEAD]),
            tuple(layer_view(*part) for part in zip(of_groups, split, strict=True)),
            (*_by_layer(caches, rest), *[None] * g.shared_caches),
        )
        if block_inputs:
            blocks = BlockView(*[next(rest) for _ in block_inputs])
            arguments = (*arguments, blocks, tuple(next(rest) for _ in summaries))
        elif budget:
            arguments = (*arguments, None, ())
        return (*arguments, next(rest), tuple(rest)) if budget else arguments

    functions: list[ir.Function] = []
    if not (block_inputs or budget):
        ports = [
            BlockPorts.of_layer(
                g.hidden,
                layer_pools,
                of_groups[group],
                launch_ports(engine_sizes),
                module.tables_of(layer),
                row_outputs=rows[layer],
            ).sharing(
                writes=layer in g.caching_layers,
                input_width=0 if g.layer_inputs is None else g.layer_inputs.width,
            )
            for layer, (layer_pools, group) in enumerate(
                zip(of_layers, group_of_layer, strict=True)
            )
        ]
        functions = call_blocks(module.model.layers, ports, block_graph)
    module.forward = partial(module.forward, group_of_layer=group_of_layer)  # type: ignore[method-assign]
    return export_module(module, declaration, pack, functions)


def block_graph(block: nn.Module, ports: BlockPorts) -> ir.Model:
    """Return a target's block alone."""
    names, shapes = block_outputs(ports)
    return export_module(
        block, GraphDeclaration("block", ports.flat, names, shapes), ports.arguments
    )


def _cache_ports(
    group: CacheGroup | StateGroup, layer: int, activations: torch.dtype
) -> tuple[InputPort, ...]:
    """Return the ports of the caches of a layer in this group."""
    ports = state_ports if isinstance(group, StateGroup) else pool_ports
    return ports(group, layer, activations)  # type: ignore[arg-type]


def _row_outputs(
    group: CacheGroup | StateGroup, layer: int, activations: torch.dtype
) -> tuple[InputPort, ...]:
    """Return the outputs of rows of a layer in this group."""
    return (state_inputs_port(group, layer, activations),) if isinstance(group, StateGroup) else ()


def _by_layer(of_layers: Sequence[tuple[InputPort, ...]], values: Iterator[Any]) -> Any:
    """Return the pools of each layer, from ``values``."""
    return tuple(layer_pools(ports, [next(values) for _ in ports]) for ports in of_layers)


def _table_length(engine_sizes: EngineSizes, ahead: int) -> int:
    """Return the positions of rotary tables with room for rows beyond the longest sequence.

    ONNX Runtime refuses launches with more rows than its tables have positions.
    """
    return max(engine_sizes.limits.max_seq_len + ahead, engine_sizes.limits.max_rows)


def _draft_table_length(engine_sizes: EngineSizes) -> int:
    """Return that number for a draft, whose levels or block extend beyond committed tokens."""
    return _table_length(
        engine_sizes, max(engine_sizes.limits.draft_depth, engine_sizes.limits.draft_block)
    )


def _block_ports(
    engine_sizes: EngineSizes, activations: torch.dtype
) -> tuple[tuple[InputPort, ...], tuple[InputPort, ...]]:
    """Return the additional inputs of the target with SpecPV: launch ports, and summaries."""
    if engine_sizes.views is None:
        return (), ()
    group = engine_sizes.choosing_group
    block_inputs = block_ports(group, batch_axis(engine_sizes), engine_sizes.views.entries)
    return block_inputs, tuple(summary_port(group, layer, activations) for layer in group.layers)


def _index_ports(
    engine_sizes: EngineSizes, activations: torch.dtype
) -> tuple[tuple[InputPort, ...], tuple[InputPort, ...], tuple[InputPort, ...]]:
    """Return the additions of DSA to the target: a launch port, the keys' pools, and an output."""
    group = engine_sizes.indexer_group
    if group is None:
        return (), (), ()
    keys = [port for layer in group.layers for port in pool_ports(group, layer, activations)]
    broken = InputPort(
        f"{INDEXER_GROUP}.violations", torch.int32, (len(group.layers), batch_axis(engine_sizes))
    )
    return (budget_port(batch_axis(engine_sizes)),), tuple(keys), (broken,)


def draft_fuse_graph(
    d: DraftGeometry,
    g: TargetGeometry,
    engine_sizes: EngineSizes,
    activations: torch.dtype,
    group: str = DRAFT_GROUP,
) -> ir.Model:
    """The role ``draft_fuse`` of the draft with this cache group."""
    family = draft_family(d.architecture)
    if family.fuse is None:
        return _context_graph(d, g, engine_sizes, activations, group)
    with torch.device("meta"):
        module = family.fuse(d, g)
    module.to(activations)
    declaration = GraphDeclaration(
        role="draft_fuse",
        inputs=(InputPort("captured", activations, ("T", len(d.aux_layers) * g.hidden)),),
        outputs=family.fused,
        output_shapes=(("T", d.hidden), *[(1, d.hidden) for _ in family.fused[1:]]),
    )
    return export_module(module, declaration, tuple)


def _context_graph(
    d: DraftGeometry,
    g: TargetGeometry,
    engine_sizes: EngineSizes,
    activations: torch.dtype,
    name: str,
) -> ir.Model:
    """Return the role ``draft_fuse`` of a draft whose caches hold projected target states."""
    group, make = engine_sizes.draft_group(name), draft_family(d.architecture).context
    assert make is not None
    with torch.device("meta"):
        module = make(d, g, _draft_table_length(engine_sizes))
    module.to(activations)
    of_layers = [pool_ports(group, layer, activations) for layer in group.layers]
    pools = [port for ports in of_layers for port in ports]
    declaration = GraphDeclaration(
        role="draft_fuse",
        inputs=(
            InputPort("captured", activations, ("T", len(d.aux_layers) * g.hidden)),
            InputPort("positions", torch.int32, ("T",)),
            InputPort(f"{group.name}.write_slot", torch.int32, ("T",)),
            *pools,
        ),
        outputs=tuple(output_name(p.name) for p in pools),
        output_shapes=tuple(p.shape for p in pools),
    )

    def pack(values: Sequence[Any]) -> tuple[Any, ...]:
        return (*values[:3], _by_layer(of_layers, iter(values[3:])))

    return export_module(module, declaration, pack)


def draft_graph(
    d: DraftGeometry,
    g: TargetGeometry,
    engine_sizes: EngineSizes,
    activations: torch.dtype,
    name: str = DRAFT_GROUP,
) -> ir.Model:
    """The role ``draft`` of the draft with the cache group ``name``."""
    family, target_layers = draft_family(d.architecture), d.target_layers(g)
    with torch.device("meta"):
        module = family.draft(d, g, _draft_table_length(engine_sizes))
    module.to(activations)
    states = () if family.fuse is None else (InputPort("hidden", activations, ("T", d.hidden)),)
    caches = engine_sizes.draft_caches(name, target_layers)
    of_groups = {g.name: view_ports(g, batch_axis(engine_sizes)) for g, _ in caches}
    of_layers = [pool_ports(group, layer, activations) for group, layer in caches]
    pools = [port for ports in of_layers for port in ports]
    written = () if target_layers else pools
    declaration = GraphDeclaration(
        role="draft",
        inputs=(
            InputPort("token_ids", torch.int32, ("T",)),
            *states,
            *launch_ports(engine_sizes),
            *[port for ports in of_groups.values() for port in ports],
            *pools,
        ),
        outputs=(
            "draft_logits",
            *["hidden_out" for _ in states],
            *[output_name(p.name) for p in written],
        ),
        output_shapes=(("R", d.vocab), *[p.shape for p in states], *[p.shape for p in written]),
        stages=("stage.attention", "stage.ffn", "stage.pre_head"),
    )

    def pack(values: Sequence[Any]) -> tuple[Any, ...]:
        first = 1 + len(states)
        tail = iter(values[len(states) + _HEAD :])
        by_group = {n: GroupView(*[next(tail) for _ in of_groups[n]]) for n in of_groups}
        by_layer = tuple(by_group[group.name] for group, _ in caches)
        launch = Launch(*values[first : len(states) + _HEAD])
        view = by_layer if target_layers else by_layer[0]
        return (*values[:first], launch, view, _by_layer(of_layers, tail))

    return export_module(module, declaration, pack)


def batch_axis(engine_sizes: EngineSizes) -> int | str:
    """Return the batch axis of a launch, which is static for a maximum batch of one."""
    return 1 if engine_sizes.limits.max_batch_size == 1 else "B"


def launch_ports(engine_sizes: EngineSizes) -> tuple[InputPort, ...]:
    """Return the launch's ports; ``row_start`` has two entries for a batch of one."""
    if engine_sizes.limits.max_batch_size > 1:
        return LAUNCH_PORTS
    return tuple(
        InputPort(port.name, port.dtype, (2,)) if port.name == "row_start" else port
        for port in LAUNCH_PORTS
    )
