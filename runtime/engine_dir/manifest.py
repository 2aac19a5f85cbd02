"""The contents of an engine directory's ``manifest.json``, as frozen dataclasses.

The manifest has no absolute path and no time stamp: equal inputs give equal bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.backends import BackendName
from specbuild.runtime.engine_dir.drafters.record import (
    DRAFT_ROLES,
    DrafterRecord,
    DraftGeometry,
    HostRecord,
    ModelRecord,
    aux_layers_of,
)
from specbuild.runtime.engine_dir.drafters.registry import DRAFT_GROUPS
from specbuild.runtime.engine_dir.features import FeatureOf, of_feature, one_of
from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.engine_dir.geometry import TargetGeometry
from specbuild.runtime.engine_dir.quantized import QuantizedProducts
from specbuild.runtime.engine_dir.strict_json import KEY

MANIFEST_FILE = "manifest.json"
MANIFEST_HASH_FILE = "manifest.sha256"
# The Ed25519 signature of the file above, if the engine is signed.
SIGNATURE_FILE = "manifest.sig"
STAGED_SIGNATURE_FILE = ".manifest.sig.new"
WEIGHTS_FILE = "weights.safetensors"
CHUNK_BYTES = 16 << 20  # one checksum per this many bytes of a chunked file

INDEXER_GROUP = "indexer"
STATE_GROUP = "recurrent"
FP8_DTYPE = "float8_e4m3fn"
# Element types of caches; a type that was added later names its feature.
CACHE_STORAGES: FeatureOf = {
    "float32": None,
    "float16": None,
    "bfloat16": None,
    FP8_DTYPE: None,
}
# Element types of stored tensors, as safetensors spells them, and their bytes.
TENSOR_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
ROLES = ("target", *DRAFT_ROLES, "choose", "accept", "commit")


@dataclass(frozen=True)
class Limits:
    """The limits of an engine. ``max_rows`` limits the rows of one target launch.

    ``draft_block`` is the maximum number of rows of a draft's block, 0 without blocks.
    """

    max_seq_len: int
    max_batch_size: int
    max_rows: int
    draft_top_k: int
    draft_depth: int
    draft_tokens: int
    draft_block: int = field(default=0, metadata=of_feature("dflash"))

    def levels_of(self, draft: DraftGeometry | None) -> int:
        """The number of levels of the longest chain of a draft model; a block also has its root."""
        deepest = min(self.draft_depth, self.draft_tokens)
        return min(deepest, draft.block - 1) if draft is not None and draft.block else deepest


@dataclass(frozen=True)
class DraftShape:
    """A draft tree: children per node, levels below the root, and number of nodes."""

    draft_top_k: int
    draft_depth: int
    draft_tokens: int

    @property
    def candidates(self) -> int:
        """The number of nodes in the pool from which the tree is selected: K + (D − 1)·K²."""
        return self.draft_top_k + (self.draft_depth - 1) * self.draft_top_k**2


@dataclass(frozen=True)
class SpecPv:
    """Verification over a partial view of the caches: lossy between full steps (specpv.py).

    Blocks have ``block_size`` tokens. A view has ``n_sink_blocks`` at the start, up to
    ``n_retrieval_blocks`` selected blocks, at least ``n_window_blocks`` at the end, and
    ``n_spec_tokens_buf`` tokens after those. Contexts up to ``partial_threshold`` tokens are
    verified in full. At most ``full_refresh_interval`` partial steps run between two full ones.
    ``score`` is the product with a block's extreme keys that selects it: attention's own, or with
    ``indexer`` that of the indexers (DSA), then for all heads of a layer alike.
    """

    block_size: int
    n_sink_blocks: int
    n_retrieval_blocks: int
    n_window_blocks: int
    n_spec_tokens_buf: int
    partial_threshold: int
    full_refresh_interval: int
    reduction: Literal["mean", "max", "last"] = "mean"
    score: Literal["dot", "quest", "indexer"] = "dot"


@dataclass(frozen=True)
class Dsa:
    """Attention to the tokens that an indexer selects: lossy (dsa.py).

    Rows at or after ``threshold`` attend to the first ``first_tokens``, the last ``recent_tokens``,
    their ancestors in the tree, and the best ``top_k`` of the others. Every ``check_interval``
    steps (0: never) a step is also verified over everything. If the agreement is below
    ``min_agreement``, steps attend to everything. ``key_dtype`` is the type to which the keys of
    indexers are rounded.
    """

    top_k: int
    threshold: int
    first_tokens: int
    recent_tokens: int
    min_agreement: float
    check_interval: int
    key_dtype: Literal["bf16", "fp8"] = "bf16"


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches share page size, widths and window.

    ``pages`` includes page 0, which is never allocated. With ``window`` 0 all positions stay
    cached. ``pool_axes`` is the axis order of a pool in this engine's graphs. ``latent_widths`` is
    set if each layer has a single pool, for a latent or an indexer's keys; it has the width of
    each. It is empty if a layer has a pool each for keys and values.
    """

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    k_width: int
    v_width: int
    page_size: int
    pages: int
    window: int
    dtype: str = field(metadata=one_of(CACHE_STORAGES))
    pool_axes: tuple[str, ...]
    latent_widths: tuple[int, ...] = field(default=(), metadata=of_feature("latents"))

    @property
    def coded(self) -> bool:
        """Whether its pools have fp8 values, which graphs and plans store as bytes."""
        return self.dtype == FP8_DTYPE

    @property
    def stored_dtype(self) -> str:
        """The element type of its pools in graphs and plans."""
        return "uint8" if self.coded else self.dtype

    def pool_widths(self, layer: int) -> dict[str, int]:
        """Return the values of a head in each pool of a layer: ``k`` and ``v``, or the latent
        ``c``.

        An indexer has keys ``k`` only.
        """
        if self.latent_widths:
            part = "k" if self.name == INDEXER_GROUP else "c"
            return {part: self.latent_widths[self.layers.index(layer)]}
        return {"k": self.k_width, "v": self.v_width}


@dataclass(frozen=True)
class StateGroup:
    """Layers with a recurrent state instead of pages: a sequence has one slot of each pool.

    ``slots`` includes two special ones. Slot 0 has the zeros that sequences start from and is never
    written. The last slot receives states that are never read. The slot of a layer has a matrix
    [key_width, value_width] for each of ``heads``, in fp32, and the last ``tail`` inputs of a
    convolution of ``channels`` channels, of type ``dtype``. ``row_width`` is the number of values
    of a row that change the state.
    """

    FEATURE: ClassVar[str] = "gated_delta"
    name: str
    layers: tuple[int, ...]
    slots: int
    heads: int
    key_width: int
    value_width: int
    channels: int
    tail: int
    row_width: int
    dtype: str = field(metadata=one_of(CACHE_STORAGES))

    @property
    def discarded(self) -> int:
        """The slot for states that are never read."""
        return self.slots - 1

    @property
    def pool_shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return the element type and shape of each pool of a layer, by its part."""
        tail = (self.slots, self.tail, self.channels)
        state = (self.slots, self.heads, self.key_width, self.value_width)
        return {"tail": (self.dtype, tail), "state": ("float32", state)}


@dataclass(frozen=True)
class Port:
    """A graph input or output; a string in ``shape`` names a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[Any, ...]


@dataclass(frozen=True)
class SizeRange:
    """The range of a dynamic axis; kernels are selected for the ``usual`` size."""

    least: int
    usual: int
    most: int


@dataclass(frozen=True)
class ShapeProfile:
    """One optimization profile of a TensorRT engine: the range of each dynamic axis by name."""

    name: str
    axes: dict[str, SizeRange]


@dataclass(frozen=True)
class Role:
    """One graph of the engine: its file, its ports, its tensors, and its op counts.

    A TensorRT engine also has its optimization profiles, in the library's order, and the number of
    layers of each type in its network.
    """

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    tensors: tuple[str, ...]
    ops: dict[str, int]
    profiles: tuple[ShapeProfile, ...] = field(default=(), metadata=of_feature("tensorrt"))
    layers: dict[str, int] = field(default_factory=dict, metadata=of_feature("tensorrt"))


@dataclass(frozen=True)
class TensorRtBuild:
    """The library versions and GPUs of TensorRT engines.

    ``compute_capabilities`` are in the form ``sm_120``. ``version_compatible`` engines run with
    later versions. ``hardware_compatible`` ones run on all GPUs of these capabilities, others only
    on the model that built them. ``plugins`` has the versions of the plugins that they use.
    """

    library: Literal["tensorrt", "tensorrt_rtx"]
    version: str
    compute_capabilities: tuple[str, ...]
    version_compatible: bool = False
    hardware_compatible: bool = False
    plugins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a weights file, and the checkpoint tensors that it was derived from.

    ``same_as`` names the tensor whose bytes in the file this one shares. ``sharded``: each rank has
    a different part of this shape, in its own file.
    """

    dtype: str = field(metadata=one_of(dict.fromkeys(TENSOR_BYTES)))
    shape: tuple[int, ...]
    sources: tuple[str, ...]
    same_as: str | None = None
    sharded: bool = field(default=False, metadata=of_feature("tensor_parallel"))


@dataclass(frozen=True)
class StoredFile:
    """A file of the directory: its size, its XXH3-128, and that of each chunk if it is chunked."""

    bytes: int
    xxh3_128: str
    chunk_bytes: int | None = None
    chunks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """The description of an engine that the runtime and ``inspect`` read before its graphs.

    ``device`` is the device that the engine was compiled for: ``cpu``, or GPU architectures. The
    first of ``drafters`` is the default, and ``draft_default`` is its tree. ``roles`` is empty if
    the engine has a plan instead of graphs (``cuda``). ``features`` are those that the file lists
    (features.py). ``replaced`` names the checkpoint tensors that the engine does not store, and
    their replacements. ``tensorrt`` is null for other backends. ``logit_processor_steps``: the plan
    has programs that change logits; with ``drafted_logit_processors`` these include all steps that
    write full logits. ``ragged_steps``: in some steps each sequence has its own number of rows.
    ``generation`` is the sampling that the checkpoint recommends.
    ``state_groups`` are the recurrent states of layers without keys and values. ``quantized``
    describes products with weights of a quantized checkpoint, None if all weights are floats.
    ``ranks`` is the number of GPUs that run the engine together; cache groups have the heads of all
    ranks.
    """

    format_version: int
    specbuild_version: str
    backend: BackendName
    device: str
    target: TargetGeometry
    drafters: tuple[DrafterRecord, ...]
    limits: Limits
    draft_default: DraftShape | None
    cache_groups: tuple[CacheGroup, ...]
    roles: dict[str, Role]
    tensors: dict[str, StoredTensor]
    options: dict[str, Any]
    warnings: tuple[str, ...]
    files: dict[str, StoredFile]
    features: tuple[str, ...] = ()
    specpv: SpecPv | None = field(default=None, metadata=of_feature("specpv"))
    replaced: dict[str, str] = field(default_factory=dict, metadata=of_feature("latents"))
    dsa: Dsa | None = field(default=None, metadata=of_feature("dsa"))
    tensorrt: TensorRtBuild | None = field(default=None, metadata=of_feature("tensorrt"))
    logit_processor_steps: bool = field(
        default=False, metadata=of_feature("adjusted_steps") | {KEY: "adjusted_steps"}
    )
    drafted_logit_processors: bool = field(default=False, metadata=of_feature("drafted_processors"))
    ragged_steps: bool = field(default=False, metadata=of_feature("ragged_steps"))
    generation: GenerationDefaults | None = field(
        default=None, metadata=of_feature("generation_defaults")
    )
    state_groups: tuple[StateGroup, ...] = field(default=(), metadata=of_feature("gated_delta"))
    quantized: QuantizedProducts | None = field(
        default=None, metadata=of_feature("quantized_products")
    )
    ranks: int = field(default=1, metadata=of_feature("tensor_parallel"))

    def __post_init__(self) -> None:
        if self.format_version != FORMAT_VERSION:
            raise ValueError(f"format version {self.format_version}, expected {FORMAT_VERSION}")

    @property
    def models(self) -> tuple[ModelRecord, ...]:
        """The draft models among the drafters."""
        return tuple(d for d in self.drafters if isinstance(d, ModelRecord))

    @property
    def host_drafters(self) -> tuple[HostRecord, ...]:
        """The drafters that propose on the host, without a model."""
        return tuple(d for d in self.drafters if isinstance(d, HostRecord))

    @property
    def draft(self) -> DraftGeometry | None:
        """The shape of the first draft model, or None if the engine has none."""
        return next((model.geometry for model in self.models), None)

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """The target's layers whose outputs ``captured`` has, for all draft models."""
        return aux_layers_of([model.geometry for model in self.models])

    @property
    def lossy_groups(self) -> tuple[str, ...]:
        """The cache groups with quantized keys and values, of the target only."""
        exact_groups = (INDEXER_GROUP, *DRAFT_GROUPS)
        return tuple(g.name for g in self.cache_groups if g.coded and g.name not in exact_groups)

    @property
    def sequence_groups(self) -> tuple[CacheGroup | StateGroup, ...]:
        """All groups in which a sequence has pages or slots."""
        return (*self.cache_groups, *self.state_groups)

    def group(self, name: str) -> CacheGroup:
        """Return the cache group of this name."""
        return next(group for group in self.cache_groups if group.name == name)
