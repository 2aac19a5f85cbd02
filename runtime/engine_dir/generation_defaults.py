"""The sampling that a checkpoint recommends, as the manifest of its engine has it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

from specbuild.runtime.errors import RequestError


@dataclass(frozen=True)
class GenerationDefaults:
    """Parameters that a checkpoint recommends where a request states none; None: none for this one.

    Raises RequestError where a value is out of range.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.sampling:
            # Here, as it loads numpy, which a manifest without defaults is read without.
            from specbuild.runtime.sampling import SamplingParams

            SamplingParams(**self.sampling)
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise RequestError(f"max_new_tokens is {self.max_new_tokens}, must be 1 or above")

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of SamplingParams that have a default here."""
        return {name: value for name, value in self.stated.items() if name != "max_new_tokens"}

    @property
    def stated(self) -> dict[str, Any]:
        """All fields that have a default here."""
        values = {name: getattr(self, name) for name in GENERATION_DEFAULTS}
        return {name: value for name, value in values.items() if value is not None}

    def with_value(self, name: str, value: Any) -> GenerationDefaults:
        """These defaults with one more, as the type of its field. RequestError where it is none."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RequestError(f"{name} is {value!r}, must be a number")
        if name in ("top_k", "max_new_tokens") and not isinstance(value, int):
            raise RequestError(f"{name} is {value!r}, must be a whole number")
        stated: Any = value if name in ("top_k", "max_new_tokens") else float(value)
        return replace(self, **{name: stated})


GENERATION_DEFAULTS = tuple(entry.name for entry in fields(GenerationDefaults))
