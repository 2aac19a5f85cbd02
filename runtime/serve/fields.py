"""Fields that several routes share, and what they mean to the engine."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, create_model

from specbuild.runtime.engine_dir.generation_defaults import GenerationDefaults
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.guides.guide import Guide
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

# A priority, less is earlier, and a deadline in time.monotonic's seconds.
Urgency: TypeAlias = tuple[int, float | None]
MAX_TIMEOUT_S = 7 * 86400.0
# The number of new tokens of a request that names none: as many as fit.
ALL_REMAINING_TOKENS = 2**31 - 1
# Choices of one call.
MAX_CHOICES = 128
# Each is looked for with each token: stop strings, the characters of all, and stop tokens.
MAX_STOPS = 128
MAX_STOP_LENGTH = 4096
MAX_STOP_TOKENS = 1024


Model = TypeVar("Model", bound=BaseModel)
# The parameters that all routes of generation have, by name.
API_PARAMETERS = {
    name: parameter
    for kind in (SamplingParams, GenerateParams)
    for name, parameter in declared_parameters(kind).items()
    if parameter.declaration.in_api
}


def with_request_parameters(model: type[Model]) -> type[Model]:
    """Return the model with a field for each of ``API_PARAMETERS`` that it does not define itself.

    A number, an object or a string may be null, which stands for its default.
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
    """``stream_options``: ``include_usage`` adds a last chunk with the numbers of tokens.

    ``continuous_usage_stats`` adds the numbers so far to every other chunk too.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


@with_request_parameters
class GenerationFields(StructuredFields):
    """The fields that completions, chats and responses have in common."""

    model: str
    # The other sampling fields are those of SamplingParams and GenerateParams.
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    stop: str | JsonList[str] | None = None
    stop_token_ids: JsonList[int] | None = None
    n: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    return_draft_tokens: bool | None = False

    @property
    def urgency(self) -> Urgency:
        """The priority, and the time at which ``timeout`` seconds from now are over."""
        return (self.priority, None if self.timeout is None else time.monotonic() + self.timeout)

    @property
    def num_choices(self) -> int:
        """How many outputs a prompt has. ApiError where it is out of range."""
        num_choices = 1 if self.n is None else self.n
        if not 1 <= num_choices <= MAX_CHOICES:
            raise invalid_value("n", f"n is {num_choices}, must be 1 to {MAX_CHOICES}")
        return num_choices

    @property
    def usage_options(self) -> StreamOptions:
        """Return which chunks of a stream have usage. ApiError where nothing is streamed."""
        options = self.stream_options
        if options is None:
            return StreamOptions()
        if not self.stream:
            raise invalid_value("stream_options", "stream_options is for streams: set stream too")
        if options.continuous_usage_stats and not options.include_usage:
            raise invalid_value(
                "stream_options.continuous_usage_stats",
                "stream_options.continuous_usage_stats needs include_usage",
            )
        return options

    @property
    def splits_by_source(self) -> bool:
        """Whether chunks hold tokens of the draft or of the target. ApiError without a stream."""
        if self.return_draft_tokens and not self.stream:
            raise invalid_value(
                "return_draft_tokens", "return_draft_tokens is for streams: set stream"
            )
        return bool(self.return_draft_tokens)

    def params(
        self,
        *,
        defaults: GenerationDefaults,
        max_tokens: int | None,
        with_text: bool,
        num_top_logprobs: int | None = None,
        guide: Guide | None = None,
    ) -> list[GenerateParams]:
        """What each choice asks of the engine; ``max_tokens`` None: the default, or as many as fit.

        ``likeliest`` tokens come with each token and its log-probability; None: neither does.
        ``guide`` is the form of the whole output.

        Choice i samples with ``choice_seed(seed, i)``; without a seed a random one stands for it.
        ``text`` False leaves the text, and with it stop strings, to the reader of the output.
        Raises ApiError.
        """
        stop, stop_tokens = self.stop_strings, self.stop_tokens
        if max_tokens is None:
            max_tokens = defaults.max_new_tokens
        max_new_tokens = ALL_REMAINING_TOKENS if max_tokens is None else max_tokens
        if max_new_tokens < 1:
            raise invalid_value("max_tokens", f"max_tokens is {max_new_tokens}, must be 1 or more")
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
        """``stop`` as strings. ApiError where one is empty, or they are too many or too long."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(stop):
            raise invalid_value("stop", "a stop string is empty; leave it out")
        length = sum(map(len, stop))
        if len(stop) > MAX_STOPS or length > MAX_STOP_LENGTH:
            raise invalid_value(
                "stop",
                f"stop has {len(stop)} strings with {length} characters, at most {MAX_STOPS} "
                f"strings with {MAX_STOP_LENGTH} characters in total are looked for",
            )
        return stop

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """``stop_token_ids``. ApiError where they are too many."""
        ids = tuple(self.stop_token_ids or ())
        if len(ids) > MAX_STOP_TOKENS:
            raise invalid_value(
                "stop_token_ids", f"stop_token_ids has {len(ids)} ids, at most {MAX_STOP_TOKENS}"
            )
        return ids


class TextFields(GenerationFields):
    """The fields of completions and chats beside: how the prompt becomes token ids."""

    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=256)] | None = None

    def truncated(
        self, ids: tuple[int, ...], *, max_seq_len: int, max_tokens: int | None
    ) -> tuple[int, ...]:
        """Return the ids that ``truncate_prompt_tokens`` keeps, the last ones by default.

        -1 keeps what leaves ``max_tokens`` to the output. ApiError where nothing would be kept.
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
    """Pydantic's errors as one sentence about the first."""
    error = errors[0]
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
    if error["type"] == "missing":
        return ApiError(400, f"{path} is missing", param=path, code="missing_required_parameter")
    message = f"{path}: {error['msg'][:1].lower()}{error['msg'][1:]}"
    return ApiError(400, message, param=path, code="invalid_type")
