"""A line of ``--prompts``: a prompt, and what it alone asks for, as in Python."""

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
    """A prompt, where it stood (``prompts.jsonl line 3``), and the parameters that it names."""

    place: str
    prompt: Prompt
    own: Mapping[str, Any] = field(default_factory=dict)

    def params(self, others: GenerateParams) -> GenerateParams:
        """The prompt's own parameters, and the ``others`` where it names none.

        Raises RequestError for one that cannot be.
        """
        try:
            return replace(others, **self.own)
        except RequestError as error:
            raise RequestError(f"{self.place}: {error}") from error


LINE_PARAMETERS = {
    name: parameter
    for kind in (SamplingParams, GenerateParams)
    for name, parameter in declared_parameters(kind).items()
    if parameter.declaration.in_line
}
# The keys of a line; a parameter that is left out, or null, is that of the command line.
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


def _biases(given: Mapping[str, float], place: str) -> dict[int, float]:
    """The biases of a line, whose keys JSON has as strings. RequestError for other keys."""
    try:
        return {int(token): bias for token, bias in given.items()}
    except ValueError:
        raise RequestError(
            f'{place}.logit_bias must be like {{"11": -5.0}}: token ids and biases'
        ) from None


_PROMPT = frozenset(entry.name for entry in fields(Prompt))


def guide_of(text: str | None) -> Guide | None:
    """The guide of ``--guide``, None without it. RequestError where it is none."""
    if text is None:
        return None
    try:
        return Guide.of(json.loads(text), name="--guide")
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--guide is not JSON: {error}") from None


def prompt_of(data: Any, place: str, default_id: str) -> PlacedPrompt:
    """The prompt of a line's decoded JSON, with ``default_id`` where the line has no id.

    SpecbuildError says what is wrong with it.
    """
    if isinstance(data, dict):
        require_names(data, [entry.name for entry in fields(_Line)], place)
    line = from_json(_Line, data, place)
    given = {entry.name: getattr(line, entry.name) for entry in fields(line)}
    given["id"] = default_id if line.id is None else line.id
    blocks = line.specpv_retrieval_blocks
    if not (blocks is None or blocks == "auto" or type(blocks) is int):
        raise RequestError(
            f"{place}.specpv_retrieval_blocks: got {blocks!r}, expected a number or 'auto'"
        )
    if line.logit_bias is not None:
        given["logit_bias"] = _biases(line.logit_bias, place)
    if line.guide is not None:
        given["guide"] = Guide.of(line.guide, name=f"{place}.guide")
    own = {n: value for n, value in given.items() if n not in _PROMPT and value is not None}
    try:
        prompt = Prompt(**{name: given[name] for name in _PROMPT})
    except RequestError as error:
        raise RequestError(f"{place}: {error}") from error
    return PlacedPrompt(place, prompt, own)
