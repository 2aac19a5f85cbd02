"""Request fields that several routes share, and their meaning for the engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.guides.reasoning_budget import ReasoningBudget
from specbuild.runtime.parameters import declared_parameters
from specbuild.runtime.sampling import (
    MAX_SEED,
    MIN_SEED,
    SamplingParams,
    choice_seed,
    served_sampling,
)
from specbuild.runtime.serve.errors import ApiError, invalid_value
from specbuild.runtime.serve.request_fields import JsonList
from specbuild.runtime.serve.structured import StructuredFields

# A priority (lower is served first) and a deadline in seconds of time.monotonic.
Urgency: TypeAlias = tuple[int, float | None]
MAX_TIMEOUT_S = 7 * 86400.0
# The value of max_new_tokens that means all tokens that the context has left.
ALL_REMAINING_TOKENS = 2**31 - 1
# The maximum of n.
MAX_CHOICES = 128
# Stops are searched with each token, so their number and total length are limited.
MAX_STOPS = 128
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKENS = 1024


Model = TypeVar("Model", bound=BaseModel)
# The parameters of all generating routes, by name.
API_PARAMETERS = {
    name: parameter
    for kind in (SamplingParams, GenerateParams)
    for name, parameter in declared_parameters(kind).items()
    if parameter.declaration.in_api
}


def with_request_parameters(model: type[Model]) -> type[Model]:
    """Return the model with a field for each of ``API_PARAMETERS`` that it does not define itself.

    A number, an object or a string may be null, which means its default.
    """
    fields: dict[str, Any] = {}
    for name, parameter in API_PARAMETERS.items():
        if name not in model.model_fields:
            type_ = parameter.json_type
            fields[name] = (type_, parameter.default) if type_ is bool else (type_ | None, None)
    return create_model(
        model.__name__,
        __base__=model,
        __module__=model.__module__,
        __doc__=model.__doc__,
        **fields,
    )


class StreamOptions(BaseModel):
    """``stream_options``: ``include_usage`` adds a last chunk with the token counts.

    ``continuous_usage_stats`` adds the counts so far to every other chunk too, but only with
    ``include_usage``.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


@with_request_parameters
class GenerationFields(StructuredFields):
    """The fields of completions, chats and responses."""

    model: str | None = None
    # with_request_parameters adds the fields of SamplingParams and GenerateParams.
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: str | JsonList[str] | None = None
    stop_token_ids: JsonList[int] | None = None
    allowed_token_ids: JsonList[int] | None = None
    bad_words: JsonList[str] | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    return_draft_tokens: bool | None = False
    return_tokens_as_token_ids: bool | None = False
    thinking_token_budget: Annotated[int, Field(ge=-1)] | None = None

    @property
    def urgency(self) -> Urgency:
        """Return the priority and the deadline that ``timeout`` sets."""
        return (self.priority, None if self.timeout is None else time.monotonic() + self.timeout)

    @property
    def num_choices(self) -> int:
        """Return the number of outputs per prompt. ApiError if it is out of range."""
        num_choices = 1 if self.n is None else self.n
        if not 1 <= num_choices <= MAX_CHOICES:
            raise invalid_value("n", f"n is {num_choices}, must be 1 to {MAX_CHOICES}")
        return num_choices

    @property
    def usage_options(self) -> StreamOptions:
        """Return which chunks of a stream have token counts. ApiError without a stream."""
        options = self.stream_options
        if options is None:
            return StreamOptions()
        if not self.stream:
            raise invalid_value("stream_options", "stream_options requires stream: true")
        return options

    @property
    def splits_by_source(self) -> bool:
        """Whether chunks separate tokens of the draft from those of the target. ApiError without a
        stream.
        """
        if self.return_draft_tokens and not self.stream:
            raise invalid_value("return_draft_tokens", "return_draft_tokens requires stream: true")
        return bool(self.return_draft_tokens)

    def params(
        self,
        *,
        defaults: GenerationDefaults,
        max_tokens: int | None,
        with_text: bool,
        num_top_logprobs: int | None = None,
        guide: Guide | None = None,
        reasoning_budget: ReasoningBudget | None = None,
    ) -> list[GenerateParams]:
        """Return the engine's parameters of each choice.

        If ``max_tokens`` is None, the model's default is used or, without one, all tokens that fit.
        For each token the ``num_top_logprobs`` most likely tokens are returned; None returns no
        log-probabilities. ``guide`` constrains the complete output. Without ``with_text`` the
        caller decodes the tokens and searches stop strings itself. ``reasoning_budget`` is that of
        ``thinking_token_budget``.

        Choice i samples with ``choice_seed(seed, i)``; without a seed, a random one is used.
        Raises ApiError if a value is invalid.
        """
        stop, stop_tokens = self.stop_strings, self.stop_tokens
        if max_tokens is None:
            max_tokens = defaults.max_new_tokens
        max_new_tokens = ALL_REMAINING_TOKENS if max_tokens is None else max_tokens
        if max_new_tokens < 1:
            raise invalid_value("max_tokens", f"max_tokens is {max_new_tokens}, must be 1 or above")
        values = {name: getattr(self, name) for name in API_PARAMETERS}
        other_params = {
            name: parameter.resolve(values[name])
            for name, parameter in declared_parameters(GenerateParams).items()
            if values.get(name) is not None
        }
        other_params |= {
            "max_new_tokens": max_new_tokens,
            "stop": stop if with_text else (),
            "stop_token_ids": stop_tokens,
            "detokenize": with_text,
            "top_logprobs": num_top_logprobs or 0,
            "logprobs": num_top_logprobs is not None,
            "guide": guide,
            "reasoning_budget": reasoning_budget,
        }
        try:
            sampling = served_sampling(values, defaults.sampling)
            seeds = [choice_seed(sampling.seed, i) for i in range(self.num_choices)]
            return [
                GenerateParams(sampling=replace(sampling, seed=seed), **other_params)
                for seed in seeds
            ]
        except RequestError as error:
            param = error.field or str(error).split(" ", 1)[0]
            raise ApiError(400, str(error), param=param) from error

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return ``stop`` as strings. ApiError if one is empty, or there are too many."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(stop):
            raise invalid_value("stop", "a stop string is empty; leave it out")
        length = sum(map(len, stop))
        if len(stop) > MAX_STOPS or length > MAX_STOP_LENGTH:
            raise invalid_value(
                "stop",
                f"stop has {len(stop)} strings with {length} characters, at most {MAX_STOPS} "
                f"strings with {MAX_STOP_LENGTH} characters in total are supported",
            )
        return stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Return ``stop_token_ids``. ApiError if there are too many."""
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKENS:
            raise invalid_value(
                "stop_token_ids", f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_TOKENS}"
            )
        return ids


class TextFields(GenerationFields):
    """The further fields of completions and chats, which control tokenization."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False

    @property
    def token_limit(self) -> int | None:
        """Return the requested number of output tokens; None if the request states none."""
        return self.max_tokens

    @property
    def num_top_logprobs(self) -> int | None:
        """Return how many of the most likely tokens are returned; None for no log-probabilities."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Return how many of the most likely tokens are returned for each token of the prompt.

        With ``echo`` these are as many as for the output. None returns no log-probabilities of the
        prompt.
        """
        if self.prompt_logprobs is None and self.echo:
            return self.num_top_logprobs
        return self.prompt_logprobs

    @property
    def generates(self) -> bool:
        """Whether output is requested. With a token limit of 0 only the prompt is processed."""
        return self.token_limit != 0

    @property
    def engine_token_limit(self) -> int | None:
        """Return the token limit for the engine, which has no requests without output."""
        return self.token_limit if self.generates else 1

    def truncated(
        self, ids: tuple[int, ...], *, max_seq_len: int, max_tokens: int | None
    ) -> tuple[int, ...]:
        """Return the token ids that ``truncate_prompt_tokens`` keeps, by default the last ones.

        -1 keeps as many as leave room for ``max_tokens``. ApiError if none would be kept.
        """
        keep = self.truncate_prompt_tokens
        if keep is None:
            return ids
        if keep == -1:
            keep = max_seq_len - max(1, max_tokens or 1)
        if keep < 1:
            raise invalid_value("truncate_prompt_tokens", "truncate_prompt_tokens keeps no token")
        return ids[:keep] if self.truncation_side == "right" else ids[-keep:]


def first_error(errors: list[Any]) -> ApiError:
    """Return the first of pydantic's errors as an ApiError."""
    error = errors[0]
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
    if error["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    message = f"{path}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return ApiError(400, message, param=path, code="invalid_type")
