"""The engine of each mode, built where it lacks or was built of something else."""

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

# What a mode is made of, as a table names it; BASE stands alone, the others have the draft.
BASE = "base"
PARTS = {BASE: "base", "eagle3": "EAGLE3", "specpv": "SpecPV", "mla": "MLA", "dsa": "DSA"}
# The file beside an engine that says what it was built of.
_KEY_SUFFIX = ".key"


@dataclass(frozen=True)
class Mode:
    """``parts`` are some of ``PARTS``, in the order of that table."""

    parts: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is asked for: ``mla+dsa``."""
        return "+".join(self.parts)

    @property
    def title(self) -> str:
        """As a table names it: what it adds to EAGLE3."""
        added = [PARTS[part] for part in self.parts if part not in (BASE, "eagle3")]
        return " ".join(f"+ {part}" for part in added) or PARTS[self.parts[0]]

    def options(self, asked: BuildOptions, output: Path) -> BuildOptions:
        """The build of this mode; sizes of lossy modes that it leaves off are left out."""
        specpv, dsa = asked.specpv, asked.dsa
        drafted = self.parts != (BASE,)
        return replace(
            asked,
            output=output,
            force=True,
            draft=asked.draft if drafted else None,
            drafting=asked.drafting if drafted else type(asked.drafting)(),
            no_mla="mla" not in self.parts,
            specpv=replace(specpv, enabled=True) if "specpv" in self.parts else SpecPvOptions(),
            dsa=replace(dsa, enabled=True) if "dsa" in self.parts else DsaOptions(enabled=False),
        )


def modes_of(text: str) -> tuple[Mode, ...]:
    """``base,eagle3,mla+dsa`` in the order given; SpecbuildError names what is none."""
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
    """The options of a configuration file, as ``build --config`` reads them, without an output."""
    config = EngineConfig.from_yaml(file)
    options = {**config.options, "output": "unused"} | {"force": True}
    sections = {**config.sections, "build": {**config.sections.get("build", {}), "output": "-"}}
    return replace(config, options=options, sections=sections).build_options()


def build_lacking(
    modes: Sequence[Mode], asked: BuildOptions, folder: Path, progress: Progress
) -> dict[Mode, bool]:
    """Builds the engines that ``folder`` lacks; which were built now.

    An engine is built again where the checkpoint's files or the options changed. Raises
    SpecbuildError where the checkpoint has not what a mode is made of.
    """
    if asked.draft is None and any(mode.parts != (BASE,) for mode in modes):
        raise SpecbuildError("every mode but base has a draft: give the build file a draft")
    _require_latents(modes, asked, progress)
    built = {}
    for mode in modes:
        options = mode.options(asked, engine_path(folder, mode))
        key, kept = _key(options), engine_path(folder, mode).with_suffix(_KEY_SUFFIX)
        whole = (options.output / MANIFEST_FILE).is_file() and kept.is_file()
        built[mode] = not whole or kept.read_bytes() != key
        if built[mode]:
            progress.note(f"building {mode.name}: {options.output}")
            folder.mkdir(parents=True, exist_ok=True)
            build(options, progress)
            replace_bytes(kept, key)
    return built


def engine_path(folder: Path, mode: Mode) -> Path:
    """Where a mode's engine lies."""
    return folder / mode.name


def _require_latents(modes: Sequence[Mode], asked: BuildOptions, progress: Progress) -> None:
    mla = next((mode for mode in modes if "mla" in mode.parts), None)
    if mla is None:
        return
    target, _ = read_checkpoints(replace(asked, draft=None, no_mla=False), progress)
    if not any(target.geometry.latent_dims):
        raise SpecbuildError(
            f"mode {mla.name}: {asked.model} has no mla_kv.safetensors; make one with 'specbuild "
            "retrofit mla' or 'specbuild train mla'"
        )


def _key(options: BuildOptions) -> bytes:
    """What an engine is built of: the format, options, and each file's name, size and time."""
    places = [options.model, *options.drafts]
    files = [
        (str(file.relative_to(place)), file.stat().st_size, file.stat().st_mtime_ns)
        for place in places
        for file in sorted(place.rglob("*") if place.is_dir() else ())
        if file.is_file()
    ]
    said = json.dumps([FORMAT_VERSION, str(options), files])
    return hashlib.sha256(said.encode()).hexdigest().encode()
