"""The sampling that a checkpoint recommends: ``generation_config.json``, or keys of a GGUF file.

Other keys of the file, including ``do_sample``, are ignored, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specbuild.builder.checkpoint.source import has_file, read_json
from specbuild.runtime.engine_dir.generation_defaults import RECOMMENDED, GenerationDefaults
from specbuild.runtime.errors import SpecbuildError

GENERATION_CONFIG = "generation_config.json"
# llama.cpp's names of the same parameters.
GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def directory_defaults(roots: tuple[Path, ...]) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the defaults of the first folder with a generation config, and warnings.

    An invalid value is omitted with a warning.
    """
    for root in roots:
        file = root / GENERATION_CONFIG
        if has_file(file):
            return _defaults(read_json(file), GENERATION_CONFIG)
    return GenerationDefaults(), ()


def gguf_defaults(keys: Mapping[str, Any]) -> tuple[GenerationDefaults, tuple[str, ...]]:
    """Return the defaults of ``general.sampling.*`` in newer GGUF files; as above."""
    return _defaults({name: keys.get(key) for name, key in GGUF_KEYS.items()}, "general.sampling")


def _defaults(given: Mapping[str, Any], where: str) -> tuple[GenerationDefaults, tuple[str, ...]]:
    found = GenerationDefaults()
    warnings = []
    for name in RECOMMENDED:
        value = given.get(name)
        if value is None:
            continue
        try:
            found = found.with_value(name, value)
        except SpecbuildError as error:
            warnings.append(f"target: {where}: {error}; the engine has no default for it")
    return found, tuple(warnings)
