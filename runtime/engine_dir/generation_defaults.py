"""The sampling parameters that a checkpoint recommends, as the engine's manifest stores them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.parameters import DeclaredParameter, declared_parameters
from specbuild.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class GenerationDefaults:
    """Defaults for parameters that a request does not set; None means no recommendation.

    Raises RequestError if a value is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in self.stated.items():
            RECOMMENDED[name].check(value)

    @property
    def sampling(self) -> dict[str, Any]:
        """Return the fields of SamplingParams that have a default here."""
        return {name: value for name, value in self.stated.items() if name != "max_new_tokens"}

    @property
    def stated(self) -> dict[str, Any]:
        """Return all fields that have a default here."""
        values = {name: getattr(self, name) for name in RECOMMENDED}
        return {name: value for name, value in values.items() if value is not None}

    def with_value(self, name: str, value: Any) -> GenerationDefaults:
        """Return a copy with one more default of its field's type; may raise RequestError."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} is {value!r}, must be a number")
        parameter = RECOMMENDED[name]
        if parameter.type is int and not isinstance(value, int):
            raise RequestError(f"{name} is {value!r}, must be a whole number")
        stated: Any = parameter.type(parameter.resolve(value))
        return replace(self, **{name: stated})


# The parameters that a checkpoint may recommend, by name: the fields of GenerationDefaults.
RECOMMENDED: dict[str, DeclaredParameter] = {
    name: parameter
    for kind in (SamplingParams, GenerateParams)
    for name, parameter in declared_parameters(kind).items()
    if parameter.declaration.model_default
}
