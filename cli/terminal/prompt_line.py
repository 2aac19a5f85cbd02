"""A line of ``--prompts``: a prompt, and its own parameters, as in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Any

from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import RequestError
from specbuild.runtime.generate_params import GenerateParams
from specbuild.runtime.guides.guide import Guide
from specbuild.runtime.parameters import declared_parameters, require_names
from specbuild.runtime.request import Prompt
from specbuild.runtime.sampling import SamplingParams


@dataclass(frozen=True)
class PlacedPrompt:
    """A prompt, its place (``prompts.jsonl line 3``), and the parameters that it sets."""

    place: str
    prompt: Prompt
    own_params: Mapping[str, Any] = field(default_factory=dict)

    def params(self, others: GenerateParams) -> GenerateParams:
        """Return the prompt's own parameters, and ``others`` for those that it does not set.

        Raises RequestError for an invalid one.
        """
        try:
            return replace(others, **self.own_params)
        except RequestError as error:
            raise RequestError(f"{self.place}: {error}") from error


LINE_PARAMETERS = {
    name: parameter
    for kind in (SamplingParams, GenerateParams)
    for name, parameter in declared_parameters(kind).items()
    if parameter.declaration.in_line
}
# The keys of a line; a parameter that is missing, or null, is that of the command line.
_Line: Any = make_dataclass(
    "_Line",
    [
        ("id", str | None, None),
        ("prompt", str | None, None),
        ("prompt_ids", tuple[int, ...] | None, None),
        ("messages", tuple[dict[str, Any], ...] | None, None),
        *((name, entry.json_type | None, None) for name, entry in LINE_PARAMETERS.items()),
    ],
    frozen=True,
)


def _biases(values: Mapping[str, float], place: str) -> dict[int, float]:
    """Return the biases of a line, whose keys are strings in JSON. RequestError for other keys."""
    try:
        return {int(token): bias for token, bias in values.items()}
    except ValueError:
        raise RequestError(
            f'{place}.logit_bias must be like {{"11": -5.0}}: token ids and biases'
        ) from None


_PROMPT = frozenset(entry.name for entry in fields(Prompt))


def guide_of(text: str | None) -> Guide | None:
    """Return the guide of ``--guide``, None without it. RequestError if it is invalid."""
    if text is None:
        return None
    try:
        return Guide.of(json.loads(text), name="--guide")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--guide is not JSON: {error}") from None


def prompt_of(data: Any, place: str, default_id: str) -> PlacedPrompt:
    """Return the prompt of a line's decoded JSON, with ``default_id`` if it has no id.

    Raises SpecbuildError for an invalid line.
    """
    if isinstance(data, dict):
        require_names(data, [entry.name for entry in fields(_Line)], place)
    line = from_json(_Line, data, place)
    values = {entry.name: getattr(line, entry.name) for entry in fields(line)}
    values["id"] = default_id if line.id is None else line.id
    blocks = line.specpv_retrieval_blocks
    if not (blocks is None or blocks == "auto" or type(blocks) is int):
        raise RequestError(
            f"{place}.specpv_retrieval_blocks: got {blocks!r}, expected a number or 'auto'"
        )
    if line.logit_bias is not None:
        values["logit_bias"] = _biases(line.logit_bias, place)
    if line.guide is not None:
        values["guide"] = Guide.of(line.guide, name=f"{place}.guide")
    own_params = {n: value for n, value in values.items() if n not in _PROMPT and value is not None}
    try:
        prompt = Prompt(**{name: values[name] for name in _PROMPT})
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    return PlacedPrompt(place, prompt, own_params)
