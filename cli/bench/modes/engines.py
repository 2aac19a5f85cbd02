"""The engine of each mode, built if it is missing or its inputs changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specbuild.builder.build import build
from specbuild.builder.durable import replace_bytes
from specbuild.builder.inputs import read_checkpoints
from specbuild.builder.options import BuildOptions, DsaOptions, SpecPvOptions
from specbuild.builder.progress import Progress
from specbuild.builder.speculative_config import EngineConfig
from specbuild.runtime import FORMAT_VERSION
from specbuild.runtime.engine_dir.manifest import MANIFEST_FILE
from specbuild.runtime.errors import SpecbuildError

# The parts of a mode, and their names in tables; BASE is alone, the others have the draft.
BASE = "base"
PARTS = {BASE: "base", "eagle3": "EAGLE3", "specpv": "SpecPV", "mla": "MLA", "dsa": "DSA"}
# The file next to an engine that records its inputs.
_KEY_SUFFIX = ".key"


@dataclass(frozen=True)
class Mode:
    """``parts`` are some of ``PARTS``, in the order of that table."""

    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name on the command line: ``mla+dsa``."""
        return "+".join(self.parts)

    @property
    def title(self) -> str:
        """The name in a table: the additions to EAGLE3."""
        added = [PARTS[part] for part in self.parts if part not in (BASE, "eagle3")]
        return " ".join(f"+ {part}" for part in added) or PARTS[self.parts[0]]

    def options(self, build_options: BuildOptions, output: Path) -> BuildOptions:
        """Return the build options of this mode, without sizes of lossy modes that it lacks."""
        specpv, dsa = build_options.specpv, build_options.dsa
        drafted = self.parts != (BASE,)
        return replace(
            build_options,
            output=output,
            force=True,
            draft=build_options.draft if drafted else None,
            drafting=build_options.drafting if drafted else type(build_options.drafting)(),
            no_mla="mla" not in self.parts,
            specpv=replace(specpv, enabled=True) if "specpv" in self.parts else SpecPvOptions(),
            dsa=replace(dsa, enabled=True) if "dsa" in self.parts else DsaOptions(enabled=False),
        )


def modes_of(text: str) -> tuple[Mode, ...]:
    """Parse ``base,eagle3,mla+dsa`` in the given order; SpecbuildError names an invalid one."""
    modes = []
    for word in (part.strip() for part in text.split(",")):
        parts = set(word.split("+"))
        if not parts <= PARTS.keys() or (BASE in parts and len(parts) > 1):
            raise SpecbuildError(
                f"MODES got {word!r}; a mode is base, or some of {', '.join(list(PARTS)[1:])} "
                "joined by +"
            )
        modes.append(Mode(tuple(part for part in PARTS if part in parts)))
    if len(set(modes)) < len(modes):
        raise SpecbuildError(f"MODES got {text}: a mode is named twice")
    return tuple(modes)


def build_file(file: Path) -> BuildOptions:
    """Return the options of a configuration file of ``build --config``, without an output."""
    config = EngineConfig.from_yaml(file)
    options = {**config.options, "output": "unused"} | {"force": True}
    sections = {**config.sections, "build": {**config.sections.get("build", {}), "output": "-"}}
    return replace(config, options=options, sections=sections).build_options()


def build_lacking(
    modes: Sequence[Mode], build_options: BuildOptions, folder: Path, progress: Progress
) -> dict[Mode, bool]:
    """Build the engines that ``folder`` lacks, and return the names of those built now.

    An engine is rebuilt if the checkpoint's files or the options changed. Raises SpecbuildError if
    the checkpoint lacks a part of a mode.
    """
    if build_options.draft is None and any(mode.parts != (BASE,) for mode in modes):
        raise SpecbuildError("every mode but base has a draft: give the build file a draft")
    _require_latents(modes, build_options, progress)
    built = {}
    for mode in modes:
        options = mode.options(build_options, engine_path(folder, mode))
        key, key_file = _key(options), engine_path(folder, mode).with_suffix(_KEY_SUFFIX)
        is_complete = (options.output / MANIFEST_FILE).is_file() and key_file.is_file()
        built[mode] = not is_complete or key_file.read_bytes() != key
        if built[mode]:
            progress.note(f"building {mode.name}: {options.output}")
            folder.mkdir(parents=True, exist_ok=True)
            build(options, progress)
            replace_bytes(key_file, key)
    return built


def engine_path(folder: Path, mode: Mode) -> Path:
    """Return the directory of a mode's engine."""
    return folder / mode.name


def _require_latents(
    modes: Sequence[Mode], build_options: BuildOptions, progress: Progress
) -> None:
    mla = next((mode for mode in modes if "mla" in mode.parts), None)
    if mla is None:
        return
    target, _ = read_checkpoints(replace(build_options, draft=None, no_mla=False), progress)
    if not any(target.geometry.latent_dims):
        raise SpecbuildError(
            f"mode {mla.name}: {build_options.model} has no mla_kv.safetensors; make one with "
            "'specbuild retrofit mla' or 'specbuild train mla'"
        )


def _key(options: BuildOptions) -> bytes:
    """Return the inputs of an engine: format, options, and each file's name, size and time."""
    places = [options.model, *options.drafts]
    files = [
        (str(file.relative_to(place)), file.stat().st_size, file.stat().st_mtime_ns)
        for place in places
        for file in sorted(place.rglob("*") if place.is_dir() else ())
        if file.is_file()
    ]
    inputs = json.dumps([FORMAT_VERSION, str(options), files])
    return hashlib.sha256(inputs.encode()).hexdigest().encode()
