"""Whether what a manifest claims of memory is borne out by its other parts.

Limits are bounded by the cache pages that they ask for, pages by the pools that graphs have,
tensors by the weights' file, files by their sizes on the disk. So nothing has to be allocated, nor
a file opened, to find that a number is too large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.cache_groups import choosing_group, pages_held, tree_slots
from specbuild.runtime.engine_dir.drafters.record import DRAFT_GROUP
from specbuild.runtime.engine_dir.manifest import (
    TENSOR_BYTES,
    WEIGHTS_FILE,
    CacheGroup,
    DraftShape,
    Limits,
    Manifest,
    SpecPv,
    StateGroup,
    StoredTensor,
)
from specbuild.runtime.engine_dir.ranks import tensors_in, weights_files
from specbuild.runtime.errors import EngineFileError

_LARGEST = 2**31 - 1
# Of a file that is read whole: a graph, a program, a tokenizer.
MOST_FILE_BYTES = 256 << 20
# Rows of a prompt's launch: builders take 256 to 2048.
_MOST_PROMPT_ROWS = 1 << 16
# What an entry of the weights' header takes beside its name, and what else the header may hold.
_ENTRY_BYTES, _OTHER_HEADER_BYTES = 1024, 1 << 20
_SPECPV_LEAST = {
    "block_size": 1,
    "n_sink_blocks": 0,
    "n_retrieval_blocks": 0,
    "n_window_blocks": 0,
    "n_spec_tokens_buf": 1,
    "partial_threshold": 0,
    "full_refresh_interval": 0,
}
_DSA_LEAST = {
    "top_k": 1,
    "threshold": 0,
    "first_tokens": 0,
    "recent_tokens": 0,
    "check_interval": 0,
}


def check_claims(manifest: Manifest) -> None:
    """Raises EngineFileError with the first number that another part contradicts."""
    _check_lossy(manifest)
    _check_draft(manifest)
    _check_rows(manifest)
    for group in manifest.cache_groups:
        _check_pages(group, manifest.limits)
    _check_states(manifest)
    _check_tensors(manifest)
    _check_files(manifest)
    _check_pools(manifest)


def most_header_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Bytes that the header of a weights' file with these tensors takes at most."""
    return _OTHER_HEADER_BYTES + sum(_ENTRY_BYTES + 6 * len(name) for name in tensors)


def pool_shapes(group: CacheGroup, specpv: SpecPv | None) -> dict[str, tuple[int, ...]]:
    """The shape of every pool of a group by the name of its port, in the engine's axis order."""
    shapes = {}
    for layer in group.layers:
        for part, width in group.pool_widths(layer).items():
            shapes[f"{group.name}.{layer}.{part}_pool"] = _ordered(group, group.page_size, width)
        if specpv is not None and group.name == choosing_group(specpv):
            # The least and the largest key of a page, in its slots' place.
            shapes[f"{group.name}.{layer}.summary_pool"] = _ordered(group, 2, group.k_width)
    return shapes


def state_pools(group: StateGroup) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The element type and shape of every pool of a group of states, by the name of its port."""
    return {
        f"{group.name}.{layer}.{part}_pool": form
        for layer in group.layers
        for part, form in group.pool_shapes.items()
    }


def _ordered(group: CacheGroup, page_size: int, width: int) -> tuple[int, ...]:
    sizes = {
        "pages": group.pages,
        "kv_heads": group.kv_heads,
        "page_size": page_size,
        "width": width,
    }
    return tuple(sizes[axis] for axis in group.pool_axes)


def _check_lossy(manifest: Manifest) -> None:
    for name, config, least in (
        ("specpv", manifest.specpv, _SPECPV_LEAST),
        ("dsa", manifest.dsa, _DSA_LEAST),
    ):
        for field in least if config is not None else ():
            value = getattr(config, field)
            if not least[field] <= value <= _LARGEST:
                raise EngineFileError(f"{name}.{field} is {value}, must be {least[field]} or above")
    specpv = manifest.specpv
    if specpv is None:
        return
    chooser = next((g for g in manifest.cache_groups if g.name == choosing_group(specpv)), None)
    if chooser is None or specpv.block_size % chooser.page_size:
        raise EngineFileError(
            f"specpv: blocks of {specpv.block_size} tokens are not whole pages of a cache group "
            f"{choosing_group(specpv)}"
        )


def _check_draft(manifest: Manifest) -> None:
    limits, default = manifest.limits, manifest.draft_default
    largest = DraftShape(limits.draft_top_k, limits.draft_depth, limits.draft_tokens)
    if not manifest.drafters:
        if tree_slots(DRAFT_GROUP, limits) > tree_slots("", limits):
            raise EngineFileError(f"limits have a draft of {_shown(largest)}, but there is none")
        return
    if not 1 <= largest.draft_tokens <= min(largest.candidates, limits.max_seq_len - 1):
        raise EngineFileError(
            f"limits.draft_tokens is {limits.draft_tokens}, the largest draft has "
            f"{largest.candidates} candidates and the longest sequence {limits.max_seq_len} tokens"
        )
    if default is None:
        return
    for name in ("draft_top_k", "draft_depth", "draft_tokens"):
        if not 1 <= getattr(default, name) <= getattr(limits, name):
            raise EngineFileError(
                f"draft_default is {_shown(default)}, limits allow {_shown(largest)}"
            )


def _check_rows(manifest: Manifest) -> None:
    limits, longest = manifest.limits, manifest.target.max_positions
    if limits.max_seq_len > longest:
        raise EngineFileError(
            f"limits.max_seq_len is {limits.max_seq_len}, the target has {longest} positions"
        )
    reverified = 0 if manifest.specpv is None else manifest.specpv.n_spec_tokens_buf
    verified = limits.max_batch_size * (limits.draft_tokens + 1 + reverified)
    if limits.max_rows > max(_MOST_PROMPT_ROWS, verified):
        raise EngineFileError(f"limits.max_rows is {limits.max_rows}, no launch has as many rows")


def _check_pages(group: CacheGroup, limits: Limits) -> None:
    """A group has pages for one sequence of the longest length, and one for each of a batch.

    Windows keep their pages for every sequence.
    """
    of_one = pages_held(group, limits, tokens=limits.max_seq_len)
    batch = limits.max_batch_size
    needed = 1 + (batch * of_one if group.window else max(batch, of_one))
    if group.pages < needed:
        raise EngineFileError(
            f"cache group {group.name} has {group.pages} pages, {batch} sequences of up to "
            f"{limits.max_seq_len} tokens need {needed}"
        )


def _check_states(manifest: Manifest) -> None:
    """The states are those of the target's layers, with a slot for each sequence of a batch."""
    g, layers = manifest.target, manifest.target.linear_layers
    if [group.layers for group in manifest.state_groups] != [layers] * bool(layers):
        raise EngineFileError(
            f"state_groups do not hold the layers of linear attention, {list(layers)}"
        )
    for group in manifest.state_groups:
        delta = g.gated_delta
        assert delta is not None
        found = (
            *(group.heads, group.key_width, group.value_width),
            *(group.channels, group.tail, group.row_width),
        )
        wanted = (
            *(delta.value_heads, delta.key_width, delta.value_width),
            *(delta.channels, delta.taps - 1, delta.row_width),
        )
        needed = manifest.limits.max_batch_size + 2
        if found != wanted or not needed <= group.slots <= _LARGEST:
            raise EngineFileError(
                f"state group {group.name} has sizes {found} and {group.slots} slots, its model "
                f"has {wanted} and needs {needed}"
            )


def _check_tensors(manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        if not all(0 <= size <= _LARGEST for size in tensor.shape):
            raise EngineFileError(f"tensor {name} has shape {list(tensor.shape)}")
    for file in weights_files(manifest):
        held = tensors_in(manifest, file)
        stored = [tensor for tensor in held.values() if tensor.same_as is None]
        total = sum(prod(tensor.shape) * TENSOR_BYTES[tensor.dtype] for tensor in stored)
        found = manifest.files[file].bytes
        if not total <= found <= total + most_header_bytes(held):
            raise EngineFileError(f"{file} has {found} bytes, its tensors take {total}")


def _check_files(manifest: Manifest) -> None:
    streamed = {WEIGHTS_FILE, *weights_files(manifest)}
    if facts_of(manifest.backend).has_engines:
        streamed |= {role.file for role in manifest.roles.values()}
    for name, entry in manifest.files.items():
        if name not in streamed and entry.bytes > MOST_FILE_BYTES:
            raise EngineFileError(
                f"file {name} has {entry.bytes} bytes, no such file has over {MOST_FILE_BYTES}"
            )


def _check_pools(manifest: Manifest) -> None:
    """Every pool that a graph takes or gives is one of a cache group's, of its shape and type."""
    known = {
        name: (group.stored_dtype, shape)
        for group in manifest.cache_groups
        for name, shape in pool_shapes(group, manifest.specpv).items()
    }
    for states in manifest.state_groups:
        known |= state_pools(states)
    for role, name, dtype, shape in _pool_ports(manifest):
        if name not in known:
            raise EngineFileError(f"role {role}: {name} is no pool of a cache group")
        if (dtype, shape) != known[name]:
            raise EngineFileError(
                f"role {role}: {name} is {dtype} {list(shape)}, its cache group's is "
                f"{known[name][0]} {list(known[name][1])}"
            )


def _pool_ports(manifest: Manifest) -> Iterator[tuple[str, str, str, tuple[object, ...]]]:
    for role, graph in manifest.roles.items():
        for port in (*graph.inputs, *graph.outputs):
            name = port.name.removesuffix(".out")
            if name.endswith("_pool"):
                yield role, name, port.dtype, port.shape


def _shown(shape: DraftShape) -> str:
    return f"{shape.draft_top_k} × {shape.draft_depth}, {shape.draft_tokens} tokens"
