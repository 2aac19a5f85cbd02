"""The options of a build for suffix decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from specbuild.builder.option_group import Described, HostDrafterOptions


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(HostDrafterOptions):
    """Suffix decoding; the fields are those of ``SuffixRecord``."""

    PREFIX: ClassVar[str] = "suffix"
    PANEL: ClassVar[str] = "Suffix decoding"

    cache_max_depth: Annotated[
        int | None,
        Described(
            "Match at most N - 1 tokens at the end of the text.", "N", least=2, most=1024, usual=24
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Described("Maximum number of proposed tokens per step.", "N", least=1, most=128, usual=24),
    ] = None
    min_token_prob: Annotated[
        float | None,
        Described(
            "Minimum estimated acceptance probability of a proposed token.",
            "P",
            least=0.0,
            most=1.0,
            usual=0.1,
        ),
    ] = None
    cached_tokens: Annotated[
        int | None,
        Described(
            "Tokens of earlier requests that are stored and searched; 0 disables this.",
            "N",
            least=0,
            usual=32768,
        ),
    ] = None
