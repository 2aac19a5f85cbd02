"""The options of ``specbuild synth``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import probabilities
from specbuild.runtime.engine_dir.drafters.registry import MODEL_NAMES

if TYPE_CHECKING:
    DraftKindName: TypeAlias = str
else:
    DraftKindName = Literal[MODEL_NAMES]

DEFAULT_ACCEPTANCE = 0.7
DEFAULT_TV = 0.2
DEFAULT_DRAFT_KIND = MODEL_NAMES[0]
WeightsFormatName: TypeAlias = Literal["int4-g128", "fp8-block", "nvfp4", "q4_k_m", "q8_0"]
_CACHE = "Attention and cache (an engine's)"
_PROMPTS = "Prompts"


@dataclass(frozen=True)
class SynthOptions(OptionGroup):
    """``acceptance`` None is a model without a draft; a pair gives each prompt a value in its
    range.

    ``unique_layers`` None stores every layer. With ``target_entropy`` the next token is one of
    several, ``acceptance`` is 1, and ``draft_tv`` is the distance of the draft from the target.
    ``weights_format`` None stores weights in bf16. ``latent`` is the number of values that every
    layer caches instead of keys and values, 0 for keys and values. ``indexer`` is the width of the
    indexers of full-attention layers, 0 for none.
    """

    PANEL: ClassVar[str] = "Model"

    geometry: Annotated[
        str,
        Described(
            "Model sizes: gpt-oss-20b, deepseek-v2-lite, tiny and others; an unknown "
            "name lists all.",
            "NAME",
        ),
    ]
    layers: Annotated[
        int | None,
        Described("Number of layers, for tests.", "N", least=1, shown="the geometry's"),
    ] = None
    acceptance: Annotated[
        float | tuple[float, float] | None,
        Described(
            "Probability that the draft is correct at each position; needs --draft. With LOW:HIGH "
            "every prompt has one of its own, spread evenly.",
            "P",
            usual=DEFAULT_ACCEPTANCE,
            typed=str,
            read=probabilities,
        ),
    ] = None
    target_entropy: Annotated[
        float | None,
        Described(
            "Mean entropy of the target's next token at temperature 1, in nats; else one token is "
            "nearly certain. The draft is eagle3.",
            "NATS",
            least=0.0,
            shown="none",
        ),
    ] = None
    draft_tv: Annotated[
        float | None,
        Described(
            "Mean total variation distance of draft and target with --target-entropy, in place of "
            "--acceptance.",
            "X",
            least=0.0,
            most=1.0,
            shown=f"{DEFAULT_TV}",
        ),
    ] = None
    confidence_auc: Annotated[
        float | None,
        Described(
            "Give right draft tokens higher probabilities than wrong ones: the area under the ROC "
            "curve. The draft is eagle3.",
            "X",
            least=0.5,
            most=0.99,
            shown="equal probabilities",
        ),
    ] = None
    draft_kind: Annotated[
        DraftKindName,
        Described(
            "Kind of the draft: eagle3, p-eagle, dflash, gemma4-assistant, or mtp "
            "(needs --engine).",
            "KIND",
        ),
    ] = DEFAULT_DRAFT_KIND
    weights_format: Annotated[
        WeightsFormatName | None,
        Described(
            "Store the weights quantized: int4-g128, fp8-block, nvfp4, or as a GGUF file q4_k_m or "
            "q8_0 (needs --output).",
            "NAME",
            shown="bf16",
        ),
    ] = None
    seed: Annotated[int, Described("Random seed.", "S", least=0)] = 0
    unique_layers: Annotated[
        int | None,
        Described(
            "Store U layers of each kind and reuse them for the others; needs --engine.",
            "U",
            least=1,
            shown="all",
        ),
    ] = None
    latent: Annotated[
        int,
        Described(
            "Cache latents of R values instead of keys and values; 0 disables them.",
            "R",
            least=0,
            panel=_CACHE,
        ),
    ] = 0
    indexer: Annotated[
        int,
        Described(
            "Add indexers of width D (DSA) to full-attention layers; 0 disables them.",
            "D",
            least=0,
            panel=_CACHE,
        ),
    ] = 0
    prompts: Annotated[
        int, Described("Number of prompts to write.", "N", least=1, panel=_PROMPTS)
    ] = 100
    prompt_tokens: Annotated[int, Described("Tokens per prompt.", "N", least=1, panel=_PROMPTS)] = (
        128
    )
