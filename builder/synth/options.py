"""What ``specbuild synth`` is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup

DEFAULT_ACCEPTANCE = 0.7
_CACHE = "Attention and cache (an engine's)"
_PROMPTS = "Prompts"


@dataclass(frozen=True)
class SynthOptions(OptionGroup):
    """``acceptance`` None is a model without a draft; ``unique_layers`` None stores every layer.

    ``latent`` is how many values every layer caches in its keys' and values' place, 0 for these;
    ``indexer`` how wide the indexers of full-attention layers are, 0 for none.
    """

    PANEL: ClassVar[str] = "Model"

    geometry: Annotated[
        str,
        Described(
            "gpt-oss-20b, deepseek-v2-lite, tiny, sizes of Llama and Qwen3, and others; a wrong "
            "name lists all.",
            "NAME",
        ),
    ]
    layers: Annotated[
        int | None,
        Described("Fewer layers, for tests.", "N", least=1, shown="the geometry's"),
    ] = None
    acceptance: Annotated[
        float | None,
        Described(
            "Probability that the draft is right, at each position; needs --draft.",
            "P",
            least=0.0,
            most=1.0,
            usual=DEFAULT_ACCEPTANCE,
        ),
    ] = None
    draft_kind: Annotated[
        Literal["eagle3", "p-eagle", "dflash", "mtp"],
        Described(
            "Kind of the draft: eagle3, p-eagle, dflash, or mtp, which needs --engine.", "KIND"
        ),
    ] = "eagle3"
    seed: Annotated[int, Described("Random seed.", "S", least=0)] = 0
    unique_layers: Annotated[
        int | None,
        Described(
            "Store U layers of each kind and name them again for the others; needs --engine.",
            "U",
            least=1,
            shown="all",
        ),
    ] = None
    latent: Annotated[
        int,
        Described(
            "Cache latents of R values in place of keys and values; 0 for none.",
            "R",
            least=0,
            panel=_CACHE,
        ),
    ] = 0
    indexer: Annotated[
        int,
        Described(
            "Give full-attention layers indexers of width D (DSA); 0 for none.",
            "D",
            least=0,
            panel=_CACHE,
        ),
    ] = 0
    prompts: Annotated[int, Described("Prompts to write.", "N", least=1, panel=_PROMPTS)] = 100
    prompt_tokens: Annotated[
        int, Described("Tokens of each prompt.", "N", least=1, panel=_PROMPTS)
    ] = 128
