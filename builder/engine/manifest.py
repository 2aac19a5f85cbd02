"""Writes ``manifest.json`` of a finished build."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from specbuild.builder.checkpoint.draft_checkpoint import DraftCheckpoint
from specbuild.builder.checkpoint.target_parts import TargetCheckpoint
from specbuild.builder.engine.shared_weights import stored_names
from specbuild.builder.engine.sizes import EngineSizes
from specbuild.builder.engine.tensorrt_engines import TensorRtEngines
from specbuild.builder.engine.writer import SAFETENSORS_DTYPES
from specbuild.builder.graph.passes.weights import Recipe, recipe_of
from specbuild.builder.options import BuildOptions
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord, own_name
from specbuild.runtime.engine_dir.manifest import (
    Manifest,
    Port,
    Role,
    StoredFile,
    StoredTensor,
)
from specbuild.runtime.engine_dir.quantized import QuantizedProducts


@dataclass(frozen=True)
class BuiltParts:
    """The results of a build before its manifest is written.

    ``models`` are the graphs of the engine, by role; ``device`` is its device; ``tensorrt``
    describes TensorRT's engines, which replace the graphs.
    """

    target: TargetCheckpoint
    drafts: tuple[DraftCheckpoint, ...]
    engine_sizes: EngineSizes
    models: Mapping[str, ir.Model]
    weights: Mapping[str, Recipe]
    warnings: tuple[str, ...]
    device: str
    tensorrt: TensorRtEngines | None = None
    quantized: QuantizedProducts | None = None


def graph_file(role: str) -> str:
    """Return the path of a role's graph in the directory: next to the weights, as ONNX requires."""
    return f"{role}.onnx"


def engine_manifest(
    options: BuildOptions, parts: BuiltParts, files: dict[str, StoredFile]
) -> Manifest:
    """Return the manifest of an engine whose other files are all written."""
    roles = {
        **{role: _role(role, model, parts.tensorrt) for role, model in parts.models.items()},
        **({} if parts.tensorrt is None else parts.tensorrt.described),
    }
    return Manifest(
        format_version=FORMAT_VERSION,
        specbuild_version=importlib.metadata.version("specbuild"),
        backend=options.backend,
        device=parts.device,
        target=parts.target.geometry,
        drafters=_drafters(parts, roles),
        limits=parts.engine_sizes.limits,
        draft_default=parts.engine_sizes.draft_default,
        cache_groups=parts.engine_sizes.groups,
        roles=roles,
        tensors=_stored(parts.weights),
        options=options.recorded(),
        warnings=parts.warnings,
        files=files,
        specpv=parts.engine_sizes.specpv,
        replaced=parts.target.replaced,
        dsa=parts.engine_sizes.dsa,
        logit_processor_steps=parts.engine_sizes.adjusted_steps,
        drafted_logit_processors=parts.engine_sizes.adjusted_steps,
        ragged_steps=parts.engine_sizes.ragged_steps,
        tensorrt=None if parts.tensorrt is None else parts.tensorrt.build,
        generation=parts.target.generation if parts.target.generation.stated else None,
        state_groups=parts.engine_sizes.states,
        quantized=parts.quantized,
        ranks=parts.engine_sizes.ranks,
    )


def _drafters(parts: BuiltParts, roles: Collection[str]) -> tuple[DrafterRecord, ...]:
    beside = () if parts.engine_sizes.host_drafter is None else (parts.engine_sizes.host_drafter,)
    entries = []
    for place, draft in enumerate(parts.drafts):
        group, geometry = draft.cache_group(place), draft.geometry
        names = (own_name(group, role) for role in draft.record.ROLES)
        own = tuple(name for name in names if name in roles)
        entries.append(draft.record(cache_group=group, roles=own, geometry=geometry))
    return (*entries, *beside)


def _stored(weights: Mapping[str, Recipe]) -> dict[str, StoredTensor]:
    names = stored_names(weights)
    return {
        name: StoredTensor(
            dtype=SAFETENSORS_DTYPES[str(recipe.dtype)],
            shape=recipe.shape,
            sources=recipe.sources,
            same_as=None if names[name] == name else names[name],
            sharded=recipe.ranks > 1,
        )
        for name, recipe in weights.items()
    }


def _role(role: str, model: ir.Model, tensorrt: TensorRtEngines | None) -> Role:
    graph, engine_sizes = model.graph, None if tensorrt is None else tensorrt.roles[role]
    counts = Counter(
        f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in graph
    )
    return Role(
        file=graph_file(role) if engine_sizes is None else engine_sizes.file,
        inputs=tuple(map(port_of, graph.inputs)),
        outputs=tuple(map(port_of, graph.outputs)),
        tensors=_weights(graph) if engine_sizes is None else engine_sizes.tensors,
        ops=dict(sorted(counts.items())),
        profiles=() if engine_sizes is None else engine_sizes.profiles,
        layers={} if engine_sizes is None else engine_sizes.layers,
    )


def _weights(graph: ir.Graph) -> tuple[str, ...]:
    return tuple(n for n, value in graph.initializers.items() if recipe_of(value) is not None)


def port_of(value: ir.Value) -> Port:
    """Return a graph's input or output as an entry of the manifest."""
    assert value.name is not None and value.dtype is not None and value.shape is not None
    shape = tuple(size if isinstance(size, int) else str(size.value) for size in value.shape)
    return Port(value.name, value.dtype.numpy().name, shape)
