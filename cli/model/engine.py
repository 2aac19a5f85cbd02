"""Converts MODEL to an engine directory: downloads and builds it if necessary."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.builder.options import BuildOptions
from specbuild.builder.speculative_config import EngineConfig, SpeculativeConfig
from specbuild.cli.model.options import ModelBuildOptions, build_options
from specbuild.cli.model.reference import (
    CheckpointReference,
    EngineReference,
    HubReference,
    ModelReference,
)
from specbuild.cli.model.reference import model_reference as model_reference  # noqa: PLC0414
from specbuild.cli.terminal.console import size_text
from specbuild.runtime.engine_dir.drafters.registry import HOST_NAMES, TARGET_LAYERS
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.builder.build import BuildReport
    from specbuild.builder.progress import Progress


@dataclass(frozen=True)
class NamedEngine:
    """An engine directory, and the name that the user gave."""

    path: Path
    name: str


def engine_for(
    reference: ModelReference,
    options: ModelBuildOptions,
    config: EngineConfig | None = None,
    *,
    drafter: str | None = None,
) -> NamedEngine:
    """Return the engine that ``reference`` is, or its cached engine, built if missing.

    ``drafter`` is the value of ``--drafter``: suffix decoding is added to the engine for it. Raises
    SpecbuildError if it cannot be built here.
    """
    from specbuild.cli.terminal.progress_bar import ProgressBar

    stated = options.stated()
    if isinstance(reference, EngineReference):
        for name in stated:
            flag = f"--{name.replace('_', '-')}"
            raise SpecbuildError(
                f"{reference.path} is an engine, and {flag} is an option of a build: leave it out, "
                "or give the checkpoint as MODEL"
            )
        return NamedEngine(reference.path, reference.title)
    stated.pop("revision", None)
    if drafter in HOST_NAMES:
        stated["drafter"] = drafter
    with ProgressBar() as progress:
        path = local_checkpoint(reference, options.revision, progress)
        if options.draft is not None:
            stated["draft"] = _draft_path(options.draft, progress)
        full_options = build_options(stated, config, model=path, output=Path("unnamed"))
        speculation = SpeculativeConfig() if config is None else config.speculative_config
        engine = _cached_engine(reference.title, full_options, speculation, progress)
    return NamedEngine(engine, reference.title)


def local_checkpoint(
    reference: CheckpointReference | HubReference, revision: str | None, progress: Progress
) -> Path:
    """Return the checkpoint directory or GGUF file, downloaded if missing.

    Raises SpecbuildError if that fails, or if a revision of a local checkpoint is requested.
    """
    if isinstance(reference, HubReference):
        from specbuild.cli.model.hub import download

        return download(reference, revision, progress)
    if revision is not None:
        raise SpecbuildError(
            f"{reference.path} is on this machine: --revision is for models of Hugging Face"
        )
    return reference.path


def build_checked(
    options: BuildOptions, speculation: SpeculativeConfig, progress: Progress
) -> BuildReport:
    """Build an engine; SpecbuildError if the model does not match its configuration file."""
    from specbuild.builder.build import build

    if not speculation.drafts:
        options = replace(options, draft=None)
    return build(options, progress, check=speculation.check_latents)


def _draft_path(draft: str, progress: Progress) -> str:
    if draft in TARGET_LAYERS and not Path(draft).exists():
        return draft
    reference = model_reference(draft)
    if isinstance(reference, EngineReference):
        raise SpecbuildError(f"--draft {draft} is an engine: give the draft's checkpoint")
    return str(local_checkpoint(reference, None, progress))


def _cached_engine(
    title: str, options: BuildOptions, speculation: SpeculativeConfig, progress: Progress
) -> Path:
    """Return the engine in the cache, built if missing."""
    from specbuild.cli.model.engine_cache import EngineCache

    cache = EngineCache.of_user()
    name = cache.name_of(title, options, progress)
    path = cache.path(name)
    if not cache.holds(name):

        def waiting() -> None:
            progress.note(f"another process is building {title} with these options: waiting for it")

        with cache.locked(name, waiting):
            if not cache.holds(name):
                start = time.monotonic()
                progress.note(f"building {title} for {options.backend}, once")
                report = build_checked(replace(options, output=path), speculation, progress)
                build_s = time.monotonic() - start
                cache.record(name, model=title, options=options, build_s=build_s)
                size = size_text(report.weight_bytes + sum(report.graph_bytes.values()))
                progress.note(f"built in {build_s:.0f} s: {path} ({size})")
    cache.touch(name)
    return path
