"""``specbuild synth``: a model with known output, as checkpoints or as an engine."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specbuild.builder.build import BuildReport, build
from specbuild.builder.checkpoint.source import read_json
from specbuild.builder.durable import (
    put_in_place,
    replace_bytes,
    staging_folder,
    write_bytes,
)
from specbuild.builder.options import BuildOptions
from specbuild.builder.progress import Progress
from specbuild.builder.synth.configs import generation_config
from specbuild.builder.synth.gguf_file import write_gguf
from specbuild.builder.synth.model import SynthModel
from specbuild.builder.synth.routing import DistinctExperts, distinct_experts
from specbuild.builder.synth.shards import write_json, write_shards
from specbuild.runtime.errors import SpecbuildError

TARGET_FOLDER, DRAFT_FOLDER = "target", "draft"
PROMPTS_FILE = "prompts.jsonl"
REPORT_FILE = "synth.json"
_OTHER_BYTES = 16 << 20


def write_checkpoints(
    model: SynthModel, output: Path, progress: Progress, *, force: bool
) -> tuple[DistinctExperts, ...]:
    """Write ``target``, ``draft``, ``prompts.jsonl`` and ``synth.json`` to ``output``.

    Raises SpecbuildError if ``output`` exists without ``force`` or is something else, for options
    of engines (``unique_layers``, ``latent``, ``indexer``, MTP layers), and for a full disk.
    """
    if model.options.unique_layers is not None:
        raise SpecbuildError(
            "--unique-layers needs --engine: a checkpoint holds every layer, an engine can name "
            "a stored one again"
        )
    if model.options.latent:
        raise SpecbuildError(
            "--latent needs --engine; for a checkpoint run specbuild retrofit mla on it"
        )
    draft_config = None if model.draft is None else model.made_draft.config
    if model.draft is not None and draft_config is None:
        raise SpecbuildError(
            f"--draft-kind {model.options.draft_kind} needs --engine: it is a layer of the model's "
            "own checkpoint, which is made for engines only"
        )
    if model.options.indexer:
        raise SpecbuildError(
            "--indexer needs --engine; for a checkpoint run specbuild train dsa on it"
        )
    output = output.resolve()
    _require_replaceable(output, force=force)
    _require_space(output.parent, model.nbytes)
    experts = distinct_experts(model)
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = staging_folder(output)
    try:
        progress.start("writing checkpoints", model.nbytes, "B")
        target = staging / TARGET_FOLDER
        pad = model.pad_token_id
        if model.gguf_mixture is not None:
            target.mkdir()
            made = (model.noise, model.target, model.target_tensors)
            write_gguf(target, made, model.gguf_mixture, progress)
        else:
            write_json(target / "config.json", model.config_fields)
            write_json(target / "generation_config.json", generation_config(model.target, pad))
            write_shards(target, model.target_tensors, progress)
        if draft_config is not None:
            draft = staging / DRAFT_FOLDER
            write_json(draft / "config.json", draft_config(model.draft, model.target))
            write_shards(draft, model.draft_tensors, progress)
        write_bytes(staging / PROMPTS_FILE, _prompt_lines(model))
        write_json(staging / REPORT_FILE, _report(model, experts))
        staging.chmod(0o755)
        put_in_place(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return experts


def build_engine(
    model: SynthModel, options: BuildOptions, progress: Progress
) -> tuple[BuildReport, tuple[DistinctExperts, ...]]:
    """Build the engine ``options.output``, whose weights are generated while stored; and its
    prompts.

    ``options.model`` and ``options.draft`` are not read. The prompts are next to the engine, see
    ``prompts_beside``. Raises SpecbuildError as ``build`` does, and if these exist already.
    """
    prompts = prompts_beside(options.output)
    if prompts.exists() and not options.force:
        raise SpecbuildError(f"{prompts} exists; remove it or pass --force")
    experts = distinct_experts(model)
    report = build(options, progress, checkpoints=model.checkpoints())
    replace_bytes(prompts, _prompt_lines(model))
    return report, experts


def prompts_beside(engine: Path) -> Path:
    """Return the path of the prompts of a synthetic engine."""
    engine = engine.resolve()
    return engine.with_name(f"{engine.name}.{PROMPTS_FILE}")


def _prompt_lines(model: SynthModel) -> bytes:
    lines = [
        json.dumps({"id": str(number), "prompt_ids": ids})
        for number, ids in enumerate(model.prompts())
    ]
    return "".join(f"{line}\n" for line in lines).encode()


def _report(model: SynthModel, experts: tuple[DistinctExperts, ...]) -> dict[str, Any]:
    return {
        "options": asdict(model.options),
        "distinct_experts": [asdict(entry) for entry in experts],
    }


def _require_replaceable(output: Path, *, force: bool) -> None:
    if not output.exists():
        return
    if not force:
        raise SpecbuildError(f"{output} exists; remove it or pass --force")
    empty = output.is_dir() and not any(output.iterdir())
    if not empty and not _is_written_here(output):
        raise SpecbuildError(
            f"{output} exists and was not written by synth; --force replaces such folders only, "
            "choose another place"
        )


def _is_written_here(output: Path) -> bool:
    """Return whether a folder has only checkpoints, prompts and their report."""
    try:
        report = read_json(output / REPORT_FILE)
        names = {path.name for path in output.iterdir()}
    except (OSError, SpecbuildError):
        return False
    folders = [output / name for name in (TARGET_FOLDER, DRAFT_FOLDER)]
    held = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return (
        report.keys() >= {"options", "distinct_experts"}
        and names <= {TARGET_FOLDER, DRAFT_FOLDER, PROMPTS_FILE, REPORT_FILE}
        and all(
            path.is_file() and path.suffix in (".json", ".safetensors", ".gguf") for path in held
        )
    )


def _require_space(folder: Path, wanted: int) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < wanted + _OTHER_BYTES:
        raise SpecbuildError(
            f"{folder}: {free / 1e9:.2f} GB free, the checkpoints need {wanted / 1e9:.2f} GB; "
            "free some space or choose another --output"
        )
