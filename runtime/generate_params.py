"""What a request generates, and how: the parameters next to its sampling."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from specbuild.runtime.errors import RequestError
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.parameters import (
    Parameter,
    Range,
    changed_fields,
    check_ranges,
    takes_fields_of,
    whole_number,
)
from specbuild.runtime.sampling import Biases, SamplingParams

MAX_TOP_LOGPROBS = 20


@takes_fields_of(SamplingParams, "sampling")
@dataclass(frozen=True)
class GenerateParams:
    """What to generate, and how.

    The fields of SamplingParams are keywords too; they take precedence over those of ``sampling``:

    >>> GenerateParams(max_new_tokens=64, temperature=0.7, top_p=0.9, seed=1).sampling.top_p
    0.9

    ``stop`` strings end the output, and so does any of ``stop_token_ids``. Neither an end of
    sequence nor a stop token is chosen before output token ``min_tokens`` + 1; a stop string ends
    the output at any time. With ``include_stop_str_in_output`` the text includes the stop string or
    token that ended it; without ``skip_special_tokens`` it includes special tokens.

    ``raw`` skips the chat template. Without ``detokenize`` events and records have no text, which
    saves the time for it; stop strings need it.

    Each token has the ``top_logprobs`` most likely tokens, 0 to 20, with their log-probabilities.
    With ``logprobs`` each token has its own; without, it has one if the engine's steps compute it
    anyway.

    ``specpv_retrieval_blocks`` limits the blocks that a partial view retrieves, on an engine with
    SpecPV: None is the engine's number, ``auto`` depends on the longest context, 0 always verifies
    over the full cache. ``dsa_top_k`` limits the tokens that a row selects on an engine with DSA:
    None is the engine's number, 0 always attends to all tokens.

    Prompts share cached prefixes only with prompts of the same ``cache_salt``.

    ``guide`` constrains the output: no end of sequence is chosen before the output matches it. The
    output ends where no token may follow, even before ``min_tokens``.

    No text of ``bad_words`` is written, as the tokenizer splits it with and without a space before
    it. ``reasoning_budget`` limits the tokens of reasoning.

    ``exact`` decodes without a draft and without lossy modes, so that any engine gives the tokens
    of plain decoding. RequestError if a lossy mode is requested as well.

    An unknown keyword raises RequestError with the nearest name.
    """

    if TYPE_CHECKING:

        def __init__(
            self,
            max_new_tokens: int = ...,
            sampling: SamplingParams = ...,
            *,
            temperature: float = ...,
            top_p: float = ...,
            top_k: int = ...,
            seed: int = ...,
            min_p: float = ...,
            presence_penalty: float = ...,
            frequency_penalty: float = ...,
            repetition_penalty: float = ...,
            logit_bias: Biases = ...,
            allowed_token_ids: tuple[int, ...] = ...,
            stop: tuple[str, ...] = ...,
            stop_token_ids: tuple[int, ...] = ...,
            bad_words: tuple[str, ...] = ...,
            ignore_eos: bool = ...,
            include_stop_str_in_output: bool = ...,
            skip_special_tokens: bool = ...,
            min_tokens: int = ...,
            top_logprobs: int = ...,
            logprobs: bool = ...,
            raw: bool = ...,
            detokenize: bool = ...,
            specpv_retrieval_blocks: int | Literal["auto"] | None = ...,
            dsa_top_k: int | None = ...,
            exact: bool = ...,
            cache_salt: str | None = ...,
            guide: Guide | None = ...,
            reasoning_budget: ReasoningBudget | None = ...,
        ) -> None: ...

    max_new_tokens: Annotated[
        int,
        Parameter(
            help="Maximum number of output tokens.", metavar="N", range=Range(1), model_default=True
        ),
    ] = 128
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: Annotated[
        tuple[str, ...],
        Parameter(help="Stop before this text; repeatable.", metavar="TEXT", in_api=True),
    ] = ()
    stop_token_ids: Annotated[tuple[int, ...], Parameter(in_api=True)] = ()
    bad_words: Annotated[tuple[str, ...], Parameter(in_api=True)] = ()
    ignore_eos: Annotated[
        bool, Parameter(help="Continue after an end-of-sequence token.", in_api=True)
    ] = False
    include_stop_str_in_output: Annotated[bool, Parameter(in_api=True)] = False
    skip_special_tokens: Annotated[bool, Parameter(in_api=True)] = True
    min_tokens: Annotated[
        int,
        Parameter(
            help="Minimum number of output tokens before an end-of-sequence token.", metavar="N",
            range=Range(0), in_api=True,
        ),
    ] = 0  # fmt: skip
    top_logprobs: Annotated[
        int,
        Parameter(
            help="Add the N most likely tokens at each position to --json.", metavar="N",
            range=Range(0, MAX_TOP_LOGPROBS),
        ),
    ] = 0  # fmt: skip
    logprobs: Annotated[
        bool,
        Parameter(help="Add the log-probability of each output token to --json.", in_line=False),
    ] = False
    raw: Annotated[bool, Parameter(help="Do not apply the chat template.")] = False
    detokenize: Annotated[bool, Parameter(in_line=False)] = True
    specpv_retrieval_blocks: Annotated[int | Literal["auto"] | None, Parameter(json_type=Any)] = (
        None
    )
    dsa_top_k: Annotated[int | None, Parameter()] = None
    exact: Annotated[bool, Parameter()] = False
    cache_salt: Annotated[str | None, Parameter(in_api=True)] = None
    guide: Annotated[
        Guide | None,
        Parameter(
            help="Constrain the output: an object with the key json, regex, choice or grammar.",
            metavar="JSON",
            json_type=dict[str, Any],
        ),
    ] = None
    reasoning_budget: Annotated[ReasoningBudget | None, Parameter(in_line=False)] = None

    def __repr__(self) -> str:
        stated = {**changed_fields(self.sampling), **changed_fields(self)}
        stated.pop("sampling", None)
        return f"GenerateParams({', '.join(f'{name}={value!r}' for name, value in stated.items())})"

    @property
    def needs_full_logits(self) -> bool:
        """Whether steps must keep logits: for log-probabilities, top-k, top-p or min-p."""
        return self.logprobs or self.sampling.cuts

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, must be 0 to max_new_tokens, "
                f"{self.max_new_tokens}",
                field="min_tokens",
            )
        if isinstance(self.stop, str):
            raise RequestError(f"stop is the string {self.stop!r}, must be a tuple of strings")
        if not isinstance(self.stop, Collection) or not all(isinstance(s, str) for s in self.stop):
            raise RequestError(f"stop is {self.stop!r}, must be a tuple of strings")
        if not all(self.stop):
            raise RequestError("a stop string is empty; leave it out")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are looked for in text: leave detokenize on")
        words = self.bad_words
        if isinstance(words, str) or not all(isinstance(word, str) and word for word in words):
            raise RequestError(
                f"bad_words is {words!r}, must be a tuple of texts", field="bad_words"
            )
        if not isinstance(self.stop_token_ids, Collection):
            raise RequestError(f"stop_token_ids is {self.stop_token_ids!r}, must be token ids")
        for token in self.stop_token_ids:
            whole_number("a stop token's id", token, field="stop_token_ids")
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt is {self.cache_salt!r}, must be a string")
        if self.exact and (self.specpv_retrieval_blocks or self.dsa_top_k):
            raise RequestError(
                "exact decodes without lossy modes: leave specpv_retrieval_blocks and dsa_top_k out"
            )

    @cached_property
    def _adjustments(self) -> tuple[str, ...]:
        """The parameters that change logits, without knowing which tokens may come."""
        sampling = self.sampling
        asked = {
            "min_p": sampling.floor < 0,
            "min_tokens": self.min_tokens > 0,
            "logit_bias": bool(sampling.logit_bias),
            "allowed_token_ids": bool(sampling.allowed_token_ids),
            "presence_penalty": sampling.presence_penalty != 0,
            "frequency_penalty": sampling.frequency_penalty != 0,
            "repetition_penalty": sampling.repetition_penalty != 1,
        }
        return tuple(name for name, asks in asked.items() if asks)

    @cached_property
    def adjusts_steps(self) -> str | None:
        """The first parameter that asks more of a step than a choice; None: none does."""
        if self.is_guided:
            return self._guide_name
        rest = ("top_logprobs",) * (self.top_logprobs > 0)
        return next((name for name in (*self._adjustments, *rest) if name != "min_p"), None)

    @property
    def checks_guide(self) -> bool:
        """Whether a choice that the guide allows is the masked choice: a mask changes no score that
        it leaves, but what is cut of the likeliest tokens depends on it.
        """
        return self.is_guided and not self.sampling.cuts

    @property
    def processes_rows(self) -> bool:
        """Whether a step changes each row's logits by the tokens before it, a guide aside, or lists
        the most likely tokens. min-p alone is a part of the choice.
        """
        return bool(self.top_logprobs) or any(name != "min_p" for name in self._adjustments)

    @property
    def adjusts_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the target's, a guide aside."""
        return bool(self._adjustments)

    @property
    def is_guided(self) -> bool:
        """Whether the tokens before restrict the next one: by a guide, bad words or a budget."""
        return bool(self.guide or self.bad_words or self.reasoning_budget)

    @property
    def _guide_name(self) -> str:
        if self.guide is not None:
            return self.guide.name
        return "bad_words" if self.bad_words else "thinking_token_budget"

    @property
    def only_guided(self) -> bool:
        """Whether a guide is all that changes a choice, which older engines can check."""
        return self.checks_guide and not (self.top_logprobs or self.adjusts_logits)
