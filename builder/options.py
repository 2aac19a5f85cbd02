"""The options of a build, from which the command line and the manifest are derived."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.kernel_options import CpuOptions, KernelOptions
from specbuild.builder.option_group import Described, HostDrafterName, OptionGroup
from specbuild.builder.option_readers import memory_size, places
from specbuild.builder.suffix_options import SuffixOptions
from specbuild.builder.tensorrt_options import TensorRtOptions
from specbuild.runtime.engine_dir.backends import BackendName

_FILES = "Files and debugging"


@dataclass(frozen=True, kw_only=True)
class LimitOptions(OptionGroup):
    """The maximum sizes of an engine, its pages, and the types of its caches."""

    PANEL: ClassVar[str] = "Limits"

    max_seq_len: Annotated[
        int | None,
        Described(
            "Maximum number of tokens of prompt and output together.",
            "N",
            least=1,
            usual=4096,
            shown="4096, or the model's limit",
        ),
    ] = None
    max_batch_size: Annotated[
        int | None, Described("Maximum number of concurrent sequences.", "N", least=1, usual=4)
    ] = None
    page_size: Annotated[
        int | None,
        Described(
            "Tokens per page of the KV cache.",
            "N",
            least=1,
            shown="16 with cpu or --specpv, else 64",
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        Described(
            "Maximum memory of the KV caches, for example 4GiB. Requests then wait for free pages.",
            "SIZE",
            least=1,
            shown="all sequences at their maximum length",
            typed=str,
            read=memory_size,
        ),
    ] = None
    kv_pages: Annotated[
        int | None,
        Described(
            "Pages of each cache that keeps all tokens; an alternative to --kv-memory.",
            "N",
            least=1,
            shown="all sequences at their maximum length",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["fp8"] | None,
        Described(
            "Store keys and values as fp8 (e4m3), one byte each (lossy).",
            "TYPE",
            shown="fp32 with cpu, else bf16",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TreeOptions(OptionGroup):
    """A draft tree: the largest of an engine, or that of a run."""

    PREFIX: ClassVar[str] = "draft"
    PANEL: ClassVar[str] = "Draft"

    top_k: Annotated[
        int | None,
        Described("Children per draft node; 1 gives a chain.", "K", least=1, shown="automatic"),
    ] = None
    depth: Annotated[
        int | None,
        Described(
            "Levels of the draft tree: the maximum number of accepted draft tokens.",
            "D",
            least=1,
            shown="automatic",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Described("Nodes of the draft tree that are verified.", "N", least=1, shown="automatic"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftStorageOptions(OptionGroup):
    """The attention and storage of an engine's draft; in a group with the prefix ``draft``."""

    window: Annotated[
        int | None,
        Described(
            "Limit the draft's attention to the last N tokens (lossless).",
            "N",
            least=1,
        ),
    ] = None
    norm_output: Annotated[
        Literal["state", "head"] | None,
        Described(
            "Meaning of norm_output in an EAGLE3 draft's config: it normalizes the "
            "state for the next level (state, as in speculators) or the input of the "
            "head (head, as in SpecForge). Lossless.",
            "WHAT",
            shown="state",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp8", "mxfp4"] | None,
        Described(
            "Storage type of the draft's weights in a CUDA engine: bf16, fp8 or mxfp4 (lossless).",
            "TYPE",
            shown="bf16",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftOptions(DraftStorageOptions, TreeOptions):
    """The largest draft tree of an engine, and the attention and storage of its draft."""


@dataclass(frozen=True, kw_only=True)
class SpecPvOptions(OptionGroup):
    """Verification over a partial view of the cache; the fields are those of ``SpecPv``."""

    PREFIX: ClassVar[str] = "specpv"
    PANEL: ClassVar[str] = "SpecPV (lossy)"

    enabled: Annotated[
        bool,
        Described(
            "Verify long contexts on a partial view of the KV cache (faster, lossy).",
            name="specpv",
        ),
    ] = False
    block_size: Annotated[int | None, Described("Tokens per block.", "N", least=1, usual=16)] = None
    n_sink_blocks: Annotated[
        int | None,
        Described("Blocks at the start that are always included.", "N", least=1, usual=2),
    ] = None
    n_retrieval_blocks: Annotated[
        int | None, Described("Maximum number of retrieved blocks.", "N", least=1, usual=256)
    ] = None
    n_window_blocks: Annotated[
        int | None, Described("Blocks at the end that are always included.", "N", least=1, usual=8)
    ] = None
    n_spec_tokens_buf: Annotated[
        int | None,
        Described(
            "Maximum number of tokens of partial steps plus one draft tree.",
            "N",
            least=1,
            usual=64,
            shown="64, more for a large tree",
        ),
    ] = None
    partial_threshold: Annotated[
        int | None,
        Described("Contexts of up to N tokens use full steps only.", "N", least=0, usual=4096),
    ] = None
    full_refresh_interval: Annotated[
        int | None,
        Described(
            "Maximum number of partial steps between two full steps; 0 disables partial steps.",
            "N",
            least=0,
            usual=32,
        ),
    ] = None
    reduction: Annotated[
        Literal["mean", "max", "last"] | None,
        Described(
            "Combination of a block's scores over the tree's queries: mean, max or "
            "last (the root's).",
            "HOW",
            usual="mean",
        ),
    ] = None
    score: Annotated[
        Literal["dot", "quest", "indexer"] | None,
        Described(
            "Score of a block: dot (products with extreme keys), quest (Quest's "
            "bound) or indexer (DSA's indexers).",
            "HOW",
            usual="dot",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DsaOptions(OptionGroup):
    """Attention to selected tokens; ``enabled`` None uses the model's config."""

    PREFIX: ClassVar[str] = "dsa"
    PANEL: ClassVar[str] = "DSA (lossy)"

    enabled: Annotated[
        bool | None,
        Described(
            "Attend only to tokens that dsa_indexer.safetensors selects (lossy).",
            name="dsa",
            flags="--dsa/--no-dsa",
            shown="as in the config",
        ),
    ] = None
    top_k: Annotated[
        int | None, Described("Number of tokens that a row attends to.", "N", least=1, usual=2048)
    ] = None
    threshold: Annotated[
        int | None,
        Described("Rows before position N attend to all tokens.", "N", least=0, usual=8192),
    ] = None
    first_tokens: Annotated[
        int | None, Described("First tokens that are always included.", "N", least=0, usual=4)
    ] = None
    recent_tokens: Annotated[
        int | None,
        Described(
            "Last tokens, including the current one, that are always included.",
            "N",
            least=1,
            usual=64,
        ),
    ] = None
    min_agreement: Annotated[
        float | None,
        Described(
            "Below this agreement, attend to all tokens.",
            "P",
            least=0.0,
            most=1.0,
            usual=0.75,
        ),
    ] = None
    check_interval: Annotated[
        int | None,
        Described(
            "Compare every N-th step with attention to all tokens; 0 disables this.",
            "N",
            least=0,
            usual=64,
        ),
    ] = None
    key_dtype: Annotated[
        Literal["bf16", "fp8"] | None,
        Described(
            "Type of the cached indexer keys: bf16, or fp8 (e4m3) with half the size "
            "and nearly the same selection.",
            "TYPE",
            usual="bf16",
        ),
    ] = None


@dataclass(frozen=True)
class BuildOptions(OptionGroup):
    """Options of ``specbuild build``; None leaves a choice to the builder."""

    PANEL: ClassVar[str] = "Model"

    model: Annotated[
        Path,
        Described("Checkpoint directory of the target, or a GGUF file.", "PATH", recorded=False),
    ]
    output: Annotated[Path, Described("Engine directory to write.", "DIR", recorded=False)]
    draft: Annotated[
        Path | tuple[Path, ...] | None,
        Described(
            "Checkpoint directory of a draft, or mtp for the model's own MTP layer. "
            "Repeatable with cpu and cuda, for drafts of different kinds.",
            "DIR",
            recorded=False,
            shown="none",
            typed=list[Path],
            read=places,
        ),
    ] = None
    drafter: Annotated[
        HostDrafterName | None,
        Described(
            "Drafter without weights, alone or with --draft: suffix proposes tokens "
            "that followed the same text earlier.",
            "NAME",
        ),
    ] = None
    backend: Annotated[
        BackendName,
        Described(
            "Backend of the engine: cpu, cuda, tensorrt or tensorrt-rtx.",
            "NAME",
            recorded=False,
        ),
    ] = "cpu"
    gpu: Annotated[
        str | None,
        Described(
            "GPU to compile for: h100, h200 or sm_90a with --backend cuda; with tensorrt-rtx a "
            "comma-separated list of sm_80, sm_86, sm_89, sm_120 and sm_121.",
            "GPU",
            recorded=False,
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        Described(
            "Number of GPUs that run the engine together, with --backend cuda: 1, 2, 4 or 8.",
            "N",
            least=1,
            recorded=False,
            shown="1",
        ),
    ] = None
    no_mla: Annotated[bool, Described("Ignore mla_kv.safetensors and cache keys and values.")] = (
        False
    )
    limits: LimitOptions = LimitOptions()
    drafting: DraftOptions = DraftOptions()
    suffix: SuffixOptions = field(default_factory=SuffixOptions)
    kernels: KernelOptions = field(default_factory=KernelOptions)
    cpu: CpuOptions = field(default_factory=CpuOptions)
    tensorrt: TensorRtOptions = field(default_factory=TensorRtOptions)
    specpv: SpecPvOptions = SpecPvOptions()
    dsa: DsaOptions = DsaOptions()
    keep_onnx: Annotated[
        Path | None,
        Described(
            "Write the portable ONNX graphs with a copy of their weights.",
            "DIR",
            panel=_FILES,
            recorded=False,
        ),
    ] = None
    portable_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        Described(
            "Type of the graphs of --keep-onnx: bfloat16, or float32 for ONNX Runtime.",
            "TYPE",
            panel=_FILES,
            shown="the type of the engine's graphs",
            recorded=False,
        ),
    ] = None
    dump_passes: Annotated[
        Path | None,
        Described(
            "Write the graph after each pass, without weights.", "DIR", panel=_FILES, recorded=False
        ),
    ] = None
    strict: Annotated[bool, Described("Refuse unknown config fields.", panel=_FILES)] = False
    allow_nonfinite: Annotated[
        bool,
        Described("Accept weights with NaN or infinity.", panel=_FILES, recorded=False),
    ] = False
    force: Annotated[
        bool, Described("Replace an existing output.", panel=_FILES, recorded=False)
    ] = False

    @property
    def ranks(self) -> int:
        """The number of GPUs that run the engine together."""
        return 1 if self.tensor_parallel is None else self.tensor_parallel

    @property
    def drafts(self) -> tuple[Path, ...]:
        """The drafts of ``draft``, the first one first."""
        given = self.draft or ()
        return (given,) if isinstance(given, Path) else given
