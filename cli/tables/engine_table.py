"""Tables of an engine's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table

from specbuild.cli.options.draft_choice import describe_shape
from specbuild.cli.tables.dsa_text import dsa_summary
from specbuild.cli.tables.predicted_memory import PredictedMemory
from specbuild.cli.terminal.console import fact_table, size_text
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.drafters.record import DraftGeometry, HostRecord
from specbuild.runtime.engine_dir.feed_forward import (
    BothFeedForward,
    DenseFeedForward,
    MoeFeedForward,
)
from specbuild.runtime.engine_dir.geometry import (
    TargetGeometry,
)
from specbuild.runtime.engine_dir.manifest import DraftShape, Manifest, SpecPv
from specbuild.runtime.engine_dir.rope_scaling import LongRopeScaling

if TYPE_CHECKING:
    from specbuild.builder.backends.cuda.report import CudaReport

OPS_SHOWN = 8


def build_summary(engine: Path, manifest: Manifest) -> Table:
    """Return path, size and limits of a built engine; warnings were printed before."""
    table = fact_table("built")
    table.add_row("engine", str(engine))
    table.add_row("size", size_text(sum(file.bytes for file in manifest.files.values())))
    _add_limits(table, manifest)
    _add_draft_default(table, manifest.draft_default)
    if manifest.specpv is not None:
        table.add_row("SpecPV", specpv_summary(manifest.specpv))
    if manifest.dsa is not None:
        table.add_row("DSA", dsa_summary(manifest))
    return table


def add_tactics(table: Table, cuda: CudaReport | None) -> None:
    """Add the share of launches that run tuned kernel variants."""
    if cuda is None or cuda.tactics is None:
        return
    tactics = cuda.tactics
    tuned = f"{tactics.tuned_launches} of {tactics.launches} launches with variants"
    table.add_row("tuned", f"{tuned}, by {tactics.file} ({tactics.device})")


def engine_tables(manifest: Manifest, memory: PredictedMemory) -> Group:
    """Return all tables of ``inspect``."""
    return Group(
        engine_table(manifest),
        target_table(manifest.target),
        *[draft_table(model.geometry) for model in manifest.models],
        *map(host_drafter_table, manifest.host_drafters),
        parts_table(manifest),
        *([roles_table(manifest)] if manifest.roles else []),
        memory_table(memory, manifest.ranks),
    )


def engine_table(manifest: Manifest) -> Table:
    """Return format, limits, options and warnings."""
    table = fact_table("engine")
    table.add_row("format", f"{manifest.format_version} (specbuild {manifest.specbuild_version})")
    table.add_row("backend", manifest.backend)
    table.add_row("built for", manifest.device)
    if manifest.ranks > 1:
        table.add_row("GPUs", f"{manifest.ranks}, which share the target's layers")
    _add_limits(table, manifest)
    _add_draft_default(table, manifest.draft_default)
    if manifest.specpv is not None:
        table.add_row("SpecPV", specpv_summary(manifest.specpv))
    if manifest.dsa is not None:
        table.add_row("DSA", dsa_summary(manifest))
    set_options = {name: value for name, value in manifest.options.items() if value}
    for name, value in set_options.items():
        table.add_row(f"built with {name}", str(value))
    for warning in manifest.warnings:
        table.add_row("warning", warning)
    return table


def _add_limits(table: Table, manifest: Manifest) -> None:
    limits = manifest.limits
    table.add_row("max sequence length", f"{limits.max_seq_len} tokens")
    table.add_row("max batch size", f"{limits.max_batch_size} sequences")
    table.add_row("max rows per launch", f"{limits.max_rows} rows")
    if not manifest.drafters and limits.draft_tokens > 0:
        table.add_row("max chain of forced tokens", f"{limits.draft_tokens} tokens")
    elif limits.draft_tokens > 0:
        largest = DraftShape(limits.draft_top_k, limits.draft_depth, limits.draft_tokens)
        table.add_row("max draft tree", describe_shape(largest))


def _add_draft_default(table: Table, default: DraftShape | None) -> None:
    table.add_row("default draft", "none" if default is None else describe_shape(default))


def specpv_summary(specpv: SpecPv) -> str:
    """Return the effect of SpecPV on the output, and its sizes."""
    view_blocks = specpv.n_sink_blocks + specpv.n_retrieval_blocks + specpv.n_window_blocks
    return (
        f"lossy: above {specpv.partial_threshold} tokens of context, partial steps read "
        f"{view_blocks} blocks of {specpv.block_size} tokens ({specpv.n_sink_blocks} sink, "
        f"{specpv.n_retrieval_blocks} retrieved, {specpv.n_window_blocks} window) and a buffer of "
        f"{specpv.n_spec_tokens_buf} tokens; a full step follows at most "
        f"{specpv.full_refresh_interval} partial steps"
    )


def target_table(target: TargetGeometry) -> Table:
    """Return layers, heads, experts and positions of the target."""
    table = fact_table(f"target: {target.model_type}")
    sliding = target.layer_types.count("sliding_attention")
    windows = f"{sliding} with a window of {target.sliding_window}" if sliding else "no windows"
    linear = len(target.linear_layers)
    states = f", {linear} with a recurrent state" if linear else ""
    table.add_row("layers", f"{target.layers}, {windows}{states}")
    table.add_row("hidden", str(target.hidden))
    table.add_row("vocabulary", str(target.vocab))
    if target.dtype is not None:
        table.add_row("weights", f"{target.dtype} (lossy)")
    _add_attention(table, target)
    for place, feed_forward in enumerate(target.feed_forwards):
        count = target.layer_feed_forwards.count(place)
        if isinstance(feed_forward, DenseFeedForward):
            layers = f"{count} of {target.layers} layers"
            table.add_row("dense MLP", f"of {feed_forward.inner}, in {layers}")
        else:
            table.add_row("experts", _experts_text(feed_forward))
    table.add_row("positions", f"{target.max_positions}, RoPE theta {target.rope.theta:g}")
    if target.rope.scaling is not None:
        scaling = target.rope.scaling
        factor = (
            "a factor per frequency"
            if isinstance(scaling, LongRopeScaling)
            else f"factor {scaling.factor:g}"
        )
        table.add_row("RoPE scaling", f"{scaling.kind}, {factor}")
    table.add_row("end-of-sequence tokens", ", ".join(map(str, target.eos_token_ids)) or "none")
    return table


def _add_attention(table: Table, target: TargetGeometry) -> None:
    """Add the heads, and the sizes of latents."""
    mla = target.mla
    widths = [size for size in target.latent_dims if size]
    if mla is None:
        heads = f"{target.q_heads} query and {target.kv_heads} KV heads of {target.head_dim}"
        expanded = 2 * target.kv_heads * target.head_dim
    else:
        heads = (
            f"MLA, {target.q_heads} heads of {mla.nope_dim} + {mla.rope_dim} rotated, values of "
            f"{mla.v_dim}"
        )
        expanded = target.q_heads * (mla.nope_dim + mla.rope_dim + mla.v_dim)
    table.add_row("attention", heads)
    if widths:
        table.add_row(
            "latent KV",
            f"{len(widths)} layers cache {_range(widths)} values per token instead of {expanded}",
        )


def _experts_text(feed_forward: MoeFeedForward | BothFeedForward) -> str:
    if isinstance(feed_forward, BothFeedForward):
        moe, shared = feed_forward.moe, f", and shared experts of {feed_forward.dense.inner}"
    else:
        moe, shared = feed_forward, ""
    grouped = f", of {moe.groups_chosen} in {moe.groups} groups" if moe.groups > 1 else ""
    return (
        f"{moe.experts} of {moe.inner}, {moe.experts_per_token} per token, {moe.storage} in the "
        f"checkpoint{grouped}{shared}"
    )


def _range(values: list[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"


def draft_table(draft: DraftGeometry) -> Table:
    """Return layers, heads and vocabulary of a draft."""
    table = fact_table(f"draft: {draft.architecture}")
    for label, text in draft.facts():
        table.add_row(label, text)
    table.add_row("vocabulary", f"{draft.vocab} ({draft.d2t_form})")
    table.add_row("weights", draft.dtype or "unknown")
    table.add_row("attention", _draft_attention(draft))
    table.add_row("target layers read", ", ".join(map(str, draft.aux_layers)))
    table.add_row("RoPE", f"theta {draft.rope.theta:g}, scaling {draft.rope.kind}")
    return table


def _draft_attention(draft: DraftGeometry) -> str:
    if draft.mla is not None:
        return f"{draft.q_heads} heads over latents of {draft.head_dim} values (MLA)"
    return f"{draft.q_heads} query and {draft.kv_heads} KV heads of {draft.head_dim}"


def host_drafter_table(drafter: HostRecord) -> Table:
    """Return the settings of a drafter that proposes on the host."""
    table = fact_table(f"drafter: {drafter.kind}")
    for label, text in drafter.facts():
        table.add_row(label, text)
    return table


def parts_table(manifest: Manifest) -> Table:
    """Return the files and their sizes."""
    table = Table(title="files", title_justify="left")
    table.add_column("file")
    table.add_column("size", justify="right")
    has_plan = facts_of(manifest.backend).has_plan
    folders: dict[str, list[int]] = {}
    for name, stored in manifest.files.items():
        folder, _, file = name.partition("/")
        if file and has_plan:
            folders.setdefault(folder, []).append(stored.bytes)
            continue
        table.add_row(name, size_text(stored.bytes))
    for folder, sizes in folders.items():
        table.add_row(f"{folder}/ ({len(sizes)} files)", size_text(sum(sizes)))
    table.add_row("total", size_text(sum(file.bytes for file in manifest.files.values())))
    return table


def roles_table(manifest: Manifest) -> Table:
    """Return the graphs and the ops of each."""
    table = Table(title="graphs", title_justify="left")
    table.add_column("role")
    table.add_column("tensors", justify="right")
    table.add_column("nodes", justify="right")
    table.add_column("ops", overflow="fold")
    for name, role in manifest.roles.items():
        table.add_row(
            name,
            str(len(role.tensors)),
            str(sum(role.ops.values())),
            ops_text(role.ops),
        )
    return table


def ops_text(ops: Mapping[str, int]) -> str:
    """Return the most frequent ops with their counts; ``--json`` has all of them."""
    most_first = sorted(ops.items(), key=lambda item: (-item[1], item[0]))
    counts = [f"{op} {count}" for op, count in most_first[:OPS_SHOWN]]
    more = len(most_first) - OPS_SHOWN
    return ", ".join([*counts, f"{more} other kinds"] if more > 0 else counts)


def memory_table(memory: PredictedMemory, ranks: int = 1) -> Table:
    """Return the predicted memory by use, of each of ``ranks`` GPUs."""
    table = fact_table("predicted memory" if ranks == 1 else "predicted memory of each GPU")
    table.add_row("limits", f"{memory.max_batch_size} sequences of {memory.max_seq_len} tokens")
    table.add_row("weights", size_text(memory.weights_bytes))
    for group, size_bytes in memory.kv_bytes.items():
        table.add_row(f"KV cache, {group}", size_text(size_bytes))
    for group, size_bytes in memory.state_bytes.items():
        table.add_row(f"states, {group}", size_text(size_bytes))
    table.add_row("outputs", size_text(memory.outputs_bytes))
    table.add_row("total", size_text(memory.total_bytes))
    return table
