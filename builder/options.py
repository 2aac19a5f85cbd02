"""What a build is asked for: the command line, ``BuildOptions`` and the manifest derive from it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import memory_size, places
from specbuild.builder.suffix_options import SuffixOptions
from specbuild.builder.tensorrt_options import TensorRtOptions
from specbuild.runtime.engine_dir.backends import BackendName

_FILES = "Files and debugging"


@dataclass(frozen=True, kw_only=True)
class LimitOptions(OptionGroup):
    """The sizes that an engine may not exceed, its pages, and what these hold."""

    PANEL: ClassVar[str] = "Limits"

    max_seq_len: Annotated[
        int | None,
        Described(
            "Longest prompt plus output, in tokens.",
            "N",
            least=1,
            usual=4096,
            shown="4096, or the model's",
        ),
    ] = None
    max_batch_size: Annotated[
        int | None, Described("Sequences decoded at once.", "N", least=1, usual=4)
    ] = None
    page_size: Annotated[
        int | None,
        Described(
            "Tokens in a page of the KV cache.",
            "N",
            least=1,
            shown="16 on the CPU and with --specpv, else 64",
        ),
    ] = None
    kv_memory: Annotated[
        int | None,
        Described(
            "Memory of the KV caches, as 4GiB, below that of every sequence at its longest.",
            "SIZE",
            least=1,
            shown="every sequence at its longest",
            typed=str,
            read=memory_size,
        ),
    ] = None
    kv_pages: Annotated[
        int | None,
        Described(
            "Pages of each cache that keeps every token, in place of --kv-memory.",
            "N",
            least=1,
            shown="every sequence at its longest",
        ),
    ] = None
    kv_dtype: Annotated[
        Literal["fp8"] | None,
        Described(
            "Store keys and values as fp8 (e4m3), a byte each: lossy.",
            "TYPE",
            shown="fp32 on the CPU, else bf16",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class TreeOptions(OptionGroup):
    """A draft tree: the largest of an engine, or that of a run."""

    PREFIX: ClassVar[str] = "draft"
    PANEL: ClassVar[str] = "Draft"

    top_k: Annotated[
        int | None,
        Described("Children of each draft node; 1 is a chain.", "K", least=1, shown="automatic"),
    ] = None
    depth: Annotated[
        int | None,
        Described(
            "Levels below the root: the longest draft that can be accepted.",
            "D",
            least=1,
            shown="automatic",
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Described("Draft nodes kept and verified.", "N", least=1, shown="automatic"),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DraftOptions(TreeOptions):
    """The largest draft tree of an engine, and how its draft attends and is stored."""

    window: Annotated[
        int | None,
        Described(
            "Let the draft attend to its last N tokens only; the output stays the same.",
            "N",
            least=1,
        ),
    ] = None
    norm_output: Annotated[
        Literal["state", "head"] | None,
        Described(
            "What norm_output in an EAGLE3 draft's config norms: the state that the next level "
            "reads (speculators), or what the head reads (SpecForge); the output stays the same.",
            "WHAT",
            shown="state",
        ),
    ] = None
    dtype: Annotated[
        Literal["bf16", "fp8", "mxfp4"] | None,
        Described(
            "How a CUDA engine stores the draft's weights: bf16, fp8 or mxfp4; the output stays "
            "the same.",
            "TYPE",
            shown="bf16",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class KernelOptions(OptionGroup):
    """Which variants of CUDA kernels an engine takes."""

    PANEL: ClassVar[str] = "CUDA kernels"

    tactics: Annotated[
        Path | None,
        Described(
            "Kernel variants that tune measured, not the shipped file's.", "FILE", recorded=False
        ),
    ] = None
    weights_dtype: Annotated[
        Literal["bf16", "fp8", "mxfp4"] | None,
        Described(
            "How a CUDA engine stores the model's projections and head: bf16, or fp8 or mxfp4, "
            "which are lossy; a CPU engine only rounds them so.",
            "TYPE",
            shown="bf16",
        ),
    ] = None
    screen_head: Annotated[
        bool, Described("Store the head in 8 bits too, read first: the same tokens sooner.")
    ] = False
    tuned_only: Annotated[
        bool, Described("Refuse a shape for which no kernel variant was measured.", recorded=False)
    ] = False


@dataclass(frozen=True, kw_only=True)
class SpecPvOptions(OptionGroup):
    """Verification over a partial view of the cache; the fields are those of ``SpecPv``."""

    PREFIX: ClassVar[str] = "specpv"
    PANEL: ClassVar[str] = "SpecPV (lossy)"

    enabled: Annotated[
        bool,
        Described(
            "Verify long contexts over a partial view of the cache: faster, and lossy.",
            name="specpv",
        ),
    ] = False
    block_size: Annotated[int | None, Described("Tokens of a block.", "N", least=1, usual=16)] = (
        None
    )
    n_sink_blocks: Annotated[
        int | None, Described("Blocks kept at the start.", "N", least=1, usual=2)
    ] = None
    n_retrieval_blocks: Annotated[
        int | None, Described("Blocks retrieved at most.", "N", least=1, usual=256)
    ] = None
    n_window_blocks: Annotated[
        int | None, Described("Blocks kept at the end.", "N", least=1, usual=8)
    ] = None
    n_spec_tokens_buf: Annotated[
        int | None,
        Described(
            "Tokens of partial steps and a tree, at most.",
            "N",
            least=1,
            usual=64,
            shown="64, more for a large tree",
        ),
    ] = None
    partial_threshold: Annotated[
        int | None,
        Described("Contexts up to N tokens are verified whole.", "N", least=0, usual=4096),
    ] = None
    full_refresh_interval: Annotated[
        int | None,
        Described(
            "Partial steps between two full ones at most; 0 allows none.", "N", least=0, usual=32
        ),
    ] = None
    reduction: Annotated[
        Literal["mean", "max", "last"] | None,
        Described(
            "A block's score over the tree's queries: mean, max, or the root's (last).",
            "HOW",
            usual="mean",
        ),
    ] = None
    score: Annotated[
        Literal["dot", "quest", "indexer"] | None,
        Described(
            "By products with extreme keys (dot), Quest's bound (quest), or that of DSA's indexers "
            "(indexer).",
            "HOW",
            usual="dot",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DsaOptions(OptionGroup):
    """Attention to chosen tokens; ``enabled`` None goes by the model's config."""

    PREFIX: ClassVar[str] = "dsa"
    PANEL: ClassVar[str] = "DSA (lossy)"

    enabled: Annotated[
        bool | None,
        Described(
            "Attend to the tokens that dsa_indexer.safetensors chooses: lossy.",
            name="dsa",
            flags="--dsa/--no-dsa",
            shown="as the config says",
        ),
    ] = None
    top_k: Annotated[
        int | None, Described("Tokens that a row chooses.", "N", least=1, usual=2048)
    ] = None
    threshold: Annotated[
        int | None,
        Described("Tokens before position N attend to everything.", "N", least=0, usual=8192),
    ] = None
    first_tokens: Annotated[
        int | None, Described("Tokens kept at the start.", "N", least=0, usual=4)
    ] = None
    recent_tokens: Annotated[
        int | None, Described("Tokens kept at the end, itself too.", "N", least=1, usual=64)
    ] = None
    min_agreement: Annotated[
        float | None,
        Described(
            "Attend to everything where less of what checks compare agrees.",
            "P",
            least=0.0,
            most=1.0,
            usual=0.75,
        ),
    ] = None
    check_interval: Annotated[
        int | None,
        Described(
            "Check every N-th step against attention to everything; 0 checks none.",
            "N",
            least=0,
            usual=64,
        ),
    ] = None
    key_dtype: Annotated[
        Literal["bf16", "fp8"] | None,
        Described(
            "The cached keys of indexers: bf16, or fp8 (e4m3), which takes half and chooses "
            "nearly the same.",
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
            "Checkpoint directory of a draft; mtp: the model's own MTP layer. Repeatable for cpu "
            "and cuda: drafts of several kinds.",
            "DIR",
            recorded=False,
            shown="none",
            typed=list[Path],
            read=places,
        ),
    ] = None
    drafter: Annotated[
        Literal["suffix"] | None,
        Described(
            "A drafter without weights, alone or beside --draft: suffix proposes what followed "
            "before in the text or in earlier ones.",
            "NAME",
        ),
    ] = None
    backend: Annotated[
        BackendName,
        Described(
            "What the engine runs on: cpu, cuda, tensorrt or tensorrt-rtx.",
            "NAME",
            recorded=False,
        ),
    ] = "cpu"
    gpu: Annotated[
        str | None,
        Described(
            "GPU to compile for: sm_90a with --backend cuda; with tensorrt-rtx one or more of "
            "sm_80, sm_86, sm_89, sm_120 and sm_121, separated by commas.",
            "ARCH",
            recorded=False,
        ),
    ] = None
    no_mla: Annotated[bool, Described("Leave mla_kv.safetensors out: cache keys and values.")] = (
        False
    )
    limits: LimitOptions = LimitOptions()
    drafting: DraftOptions = DraftOptions()
    suffix: SuffixOptions = field(default_factory=SuffixOptions)
    kernels: KernelOptions = KernelOptions()
    tensorrt: TensorRtOptions = field(default_factory=TensorRtOptions)
    specpv: SpecPvOptions = SpecPvOptions()
    dsa: DsaOptions = DsaOptions()
    keep_onnx: Annotated[
        Path | None,
        Described(
            "Write the portable ONNX graphs, with a copy of their weights.",
            "DIR",
            panel=_FILES,
            recorded=False,
        ),
    ] = None
    portable_dtype: Annotated[
        Literal["bfloat16", "float32"] | None,
        Described(
            "The type of --keep-onnx's graphs: bfloat16, or float32, which ONNX Runtime runs.",
            "TYPE",
            panel=_FILES,
            shown="the engine's own graphs'",
            recorded=False,
        ),
    ] = None
    dump_passes: Annotated[
        Path | None,
        Described("Write the graph after each pass.", "DIR", panel=_FILES, recorded=False),
    ] = None
    strict: Annotated[bool, Described("Refuse config fields that are not known.", panel=_FILES)] = (
        False
    )
    allow_nonfinite: Annotated[
        bool,
        Described("Build weights that hold NaN or infinity.", panel=_FILES, recorded=False),
    ] = False
    force: Annotated[
        bool, Described("Replace an existing output.", panel=_FILES, recorded=False)
    ] = False

    @property
    def drafts(self) -> tuple[Path, ...]:
        """What ``draft`` names, the first one first."""
        given = self.draft or ()
        return (given,) if isinstance(given, Path) else given
