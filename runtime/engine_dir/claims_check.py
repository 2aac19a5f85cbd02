"""Checks that the sizes that a manifest states agree with its other parts.

The cache pages bound the limits, the pools of the graphs bound the pages, the weights file bounds
the tensors, and the sizes on disk bound the files. A number that is too large is therefore found
before memory is allocated or a file is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.cache_groups import choosing_group, group_pages, tree_slots
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

_MAX_SIZE = 2**31 - 1
# The maximum size of a file that is read at once: a graph, a program, a tokenizer.
MAX_FILE_BYTES = 256 << 20
# The maximum number of rows of a prompt's launch: builders choose 256 to 2048.
_MAX_PROMPT_ROWS = 1 << 16
# The bytes of a header entry in addition to its name, and of the rest of the header.
_ENTRY_BYTES, _OTHER_HEADER_BYTES = 1024, 1 << 20
_SPECPV_MINIMUMS = {
    "block_size": 1,
    "n_sink_blocks": 0,
    "n_retrieval_blocks": 0,
    "n_window_blocks": 0,
    "n_spec_tokens_buf": 1,
    "partial_threshold": 0,
    "full_refresh_interval": 0,
}
_DSA_MINIMUMS = {
    "top_k": 1,
    "threshold": 0,
    "first_tokens": 0,
    "recent_tokens": 0,
    "check_interval": 0,
}


def check_claims(manifest: Manifest) -> None:
    """Raise EngineFileError for the first number that another part contradicts."""
    _check_lossy(manifest)
    _check_draft(manifest)
    _check_rows(manifest)
    for group in manifest.cache_groups:
        _check_pages(group, manifest.limits)
    _check_states(manifest)
    _check_tensors(manifest)
    _check_files(manifest)
    _check_pools(manifest)


def max_header_bytes(tensors: Mapping[str, StoredTensor]) -> int:
    """Return the maximum number of bytes of the header of a weights file with these tensors."""
    return _OTHER_HEADER_BYTES + sum(_ENTRY_BYTES + 6 * len(name) for name in tensors)


def pool_shapes(group: CacheGroup, specpv: SpecPv | None) -> dict[str, tuple[int, ...]]:
    """Return the shape of each pool of a group, by port name, in the engine's axis order."""
    shapes = {}
    for layer in group.layers:
        for part, width in group.pool_widths(layer).items():
            shapes[f"{group.name}.{layer}.{part}_pool"] = _ordered(group, group.page_size, width)
        if specpv is not None and group.name == choosing_group(specpv):
            # The minimum and maximum key of a page are stored in the place of its slots.
            shapes[f"{group.name}.{layer}.summary_pool"] = _ordered(group, 2, group.k_width)
    return shapes


def state_pools(group: StateGroup) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the element type and shape of each pool of a group of states, by port name."""
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
    for name, config, minimums in (
        ("specpv", manifest.specpv, _SPECPV_MINIMUMS),
        ("dsa", manifest.dsa, _DSA_MINIMUMS),
    ):
        for field in minimums if config is not None else ():
            value = getattr(config, field)
            if not minimums[field] <= value <= _MAX_SIZE:
                raise EngineFileError(
                    f"{name}.{field} is {value}, must be {minimums[field]} or above"
                )
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
            raise EngineFileError(
                f"limits have a draft of {_shape_text(largest)}, but there is none"
            )
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
                f"draft_default is {_shape_text(default)}, limits allow {_shape_text(largest)}"
            )


def _check_rows(manifest: Manifest) -> None:
    limits, longest = manifest.limits, manifest.target.max_positions
    if limits.max_seq_len > longest:
        raise EngineFileError(
            f"limits.max_seq_len is {limits.max_seq_len}, the target has {longest} positions"
        )
    reverified = 0 if manifest.specpv is None else manifest.specpv.n_spec_tokens_buf
    verified = limits.max_batch_size * (limits.draft_tokens + 1 + reverified)
    if limits.max_rows > max(_MAX_PROMPT_ROWS, verified):
        raise EngineFileError(f"limits.max_rows is {limits.max_rows}, no launch has as many rows")


def _check_pages(group: CacheGroup, limits: Limits) -> None:
    """Check that a group has pages for a sequence of maximum length, and one for each of a batch.

    A group with a window must have the pages of all sequences.
    """
    of_one = group_pages(group, limits, tokens=limits.max_seq_len)
    batch = limits.max_batch_size
    needed = 1 + (batch * of_one if group.window else max(batch, of_one))
    if group.pages < needed:
        raise EngineFileError(
            f"cache group {group.name} has {group.pages} pages, {batch} sequences of up to "
            f"{limits.max_seq_len} tokens need {needed}"
        )


def _check_states(manifest: Manifest) -> None:
    """Check that the states are those of the target's layers, with a slot per sequence."""
    g, layers = manifest.target, manifest.target.linear_layers
    if [group.layers for group in manifest.state_groups] != [layers] * bool(layers):
        raise EngineFileError(
            f"state_groups do not hold the layers of linear attention, {list(layers)}"
        )
    for group in manifest.state_groups:
        delta = g.gated_delta
        assert delta is not None
        actual = (
            *(group.heads, group.key_width, group.value_width),
            *(group.channels, group.tail, group.row_width),
        )
        expected = (
            *(delta.value_heads, delta.key_width, delta.value_width),
            *(delta.channels, delta.taps - 1, delta.row_width),
        )
        needed = manifest.limits.max_batch_size + 2
        if actual != expected or not needed <= group.slots <= _MAX_SIZE:
            raise EngineFileError(
                f"state group {group.name} has sizes {actual} and {group.slots} slots, its model "
                f"has {expected} and needs {needed}"
            )


def _check_tensors(manifest: Manifest) -> None:
    for name, tensor in manifest.tensors.items():
        if not all(0 <= size <= _MAX_SIZE for size in tensor.shape):
            raise EngineFileError(f"tensor {name} has shape {list(tensor.shape)}")
    for file in weights_files(manifest):
        tensors = tensors_in(manifest, file)
        stored = [tensor for tensor in tensors.values() if tensor.same_as is None]
        total = sum(prod(tensor.shape) * TENSOR_BYTES[tensor.dtype] for tensor in stored)
        actual = manifest.files[file].bytes
        if not total <= actual <= total + max_header_bytes(tensors):
            raise EngineFileError(f"{file} has {actual} bytes, its tensors take {total}")


def _check_files(manifest: Manifest) -> None:
    streamed = {WEIGHTS_FILE, *weights_files(manifest)}
    if facts_of(manifest.backend).has_engines:
        streamed |= {role.file for role in manifest.roles.values()}
    for name, entry in manifest.files.items():
        if name not in streamed and entry.bytes > MAX_FILE_BYTES:
            raise EngineFileError(
                f"file {name} has {entry.bytes} bytes, no such file has over {MAX_FILE_BYTES}"
            )


def _check_pools(manifest: Manifest) -> None:
    """Check that each pool of a graph is in a cache group and has its shape and type."""
    expected_pools = {
        name: (group.stored_dtype, shape)
        for group in manifest.cache_groups
        for name, shape in pool_shapes(group, manifest.specpv).items()
    }
    for states in manifest.state_groups:
        expected_pools |= state_pools(states)
    for role, name, dtype, shape in _pool_ports(manifest):
        if name not in expected_pools:
            raise EngineFileError(f"role {role}: {name} is no pool of a cache group")
        if (dtype, shape) != expected_pools[name]:
            raise EngineFileError(
                f"role {role}: {name} is {dtype} {list(shape)}, its cache group's is "
                f"{expected_pools[name][0]} {list(expected_pools[name][1])}"
            )


def _pool_ports(manifest: Manifest) -> Iterator[tuple[str, str, str, tuple[object, ...]]]:
    for role, graph in manifest.roles.items():
        for port in (*graph.inputs, *graph.outputs):
            name = port.name.removesuffix(".out")
            if name.endswith("_pool"):
                yield role, name, port.dtype, port.shape


def _shape_text(shape: DraftShape) -> str:
    return f"{shape.draft_top_k} × {shape.draft_depth}, {shape.draft_tokens} tokens"
