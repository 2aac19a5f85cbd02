"""Options of ``run``: its prompts, its sampling and its output.

Help texts, ranges and defaults of request parameters are those of their declarations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.parameters import Parameter, declared_parameters
from specbuild.runtime.sampling import SamplingParams

Group = TypeVar("Group", bound=OptionGroup)
# Help shows bounds up to this size; larger ones are limits of number types.
_MAX_SHOWN_BOUND = 1000


def parameter(params: type, name: str, **others: Any) -> Described:
    """Return the option of a request parameter: a field of ``params`` with this name."""
    declared = declared_parameters(params)[name]
    declaration = declared.declaration
    shown = f"the model's, else {declared.default:g}" if declaration.model_default else None
    minimum, maximum = _bounds(declaration)
    return Described(
        declaration.help,
        declaration.metavar,
        least=minimum,
        most=maximum,
        shown=shown,
        **others,
    )


def _bounds(declaration: Parameter) -> tuple[float | None, float | None]:
    """Return the inclusive bounds of a parameter that its option checks."""
    values = declaration.range
    if values is None or values.excludes_minimum or values.minimum < -_MAX_SHOWN_BOUND:
        return None, None
    is_shown = values.maximum is not None and values.maximum <= _MAX_SHOWN_BOUND
    return 0 if values.allows_zero else values.minimum, values.maximum if is_shown else None


def _with_options_of(params: type) -> Callable[[type[Group]], type[Group]]:
    """Return a decorator that adds an option for each parameter with a help text to a group.

    A parameter for which the model may have a default is None if the option is left out.
    """

    def add(group: type[Group]) -> type[Group]:
        for name, declared in declared_parameters(params).items():
            if declared.declaration.help:
                is_optional = declared.declaration.model_default
                kind = declared.type | None if is_optional else declared.type
                group.__annotations__[name] = Annotated[kind, parameter(params, name)]
                setattr(group, name, None if is_optional else declared.default)
        return group

    return add


@dataclass(frozen=True, kw_only=True)
class PromptOptions(OptionGroup):
    """The sources of prompts; standard input if both are None."""

    PANEL: ClassVar[str] = "Prompts"

    prompt: Annotated[str | None, Described("The prompt.", "TEXT")] = None
    prompts: Annotated[
        Path | None, Described("File with one JSON object per prompt.", "FILE.jsonl")
    ] = None
    raw: Annotated[bool, parameter(GenerateParams, "raw")] = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """The end of an output, and the details that are shown."""

    PANEL: ClassVar[str] = "Output"

    max_new_tokens: Annotated[int | None, parameter(GenerateParams, "max_new_tokens")] = None
    min_tokens: Annotated[int, parameter(GenerateParams, "min_tokens")] = 0
    logprobs: Annotated[bool, parameter(GenerateParams, "logprobs")] = False
    top_logprobs: Annotated[int, parameter(GenerateParams, "top_logprobs")] = 0
    stop: Annotated[
        tuple[str, ...], parameter(GenerateParams, "stop", typed=list[str], read=repeated)
    ] = ()
    guide: Annotated[str | None, parameter(GenerateParams, "guide")] = None
    raw_terminal: Annotated[bool, Described("Do not escape control characters on a terminal.")] = (
        False
    )
    ignore_eos: Annotated[bool, parameter(GenerateParams, "ignore_eos")] = False


@dataclass(frozen=True, kw_only=True)
@_with_options_of(SamplingParams)
class SamplingOptions(OptionGroup):
    """The fields of ``SamplingParams`` with a help text; ``seed`` is the first prompt's."""

    PANEL: ClassVar[str] = "Sampling"

    @property
    def first_seed(self) -> int:
        """The seed of the first prompt."""
        return int(vars(self)["seed"])
