"""The data of a report from an engine's files, without a GPU and without reading weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specbuild.builder.engine.cache_capacity import CacheCapacity, cache_capacity
from specbuild.cli.tables.build_facts import BuildFacts, build_facts
from specbuild.cli.tables.plan_tables import PlanFacts, plan_facts
from specbuild.cli.tables.predicted_memory import PredictedMemory, predict_memory
from specbuild.cli.tables.step_cost_table import StepCostFacts, step_cost_facts
from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.files import check_sizes, manifest_digest_of, read_manifest
from specbuild.runtime.engine_dir.manifest import SIGNATURE_FILE, Manifest
from specbuild.runtime.engine_dir.origin import Origin
from specbuild.runtime.executors.cuda.check import read_plan


@dataclass(frozen=True)
class EngineFacts:
    """An engine's files; ``plan`` and ``costs`` exist for CUDA engines, ``costs`` if measured.

    ``signature`` states whether the engine is signed, and whether the signature was checked.
    """

    name: str
    manifest: Manifest
    digest: str
    signature: str
    build: BuildFacts
    memory: PredictedMemory
    capacity: CacheCapacity
    plan: PlanFacts | None
    costs: StepCostFacts | None


def engine_facts(directory: Path, origin: Origin) -> EngineFacts:
    """Read the files; EngineFileError if they are no engine, damaged or of another origin."""
    manifest = read_manifest(directory, origin)
    check_sizes(directory, manifest)
    plan = costs = launched = None
    if facts_of(manifest.backend).has_plan:
        plan = read_plan(directory, manifest)
        launched = plan_facts(directory, manifest, plan)
        costs = step_cost_facts(directory, manifest, plan)
    lossy = manifest.specpv is not None or manifest.dsa is not None
    return EngineFacts(
        name=directory.resolve().name,
        manifest=manifest,
        digest=manifest_digest_of(directory)[:64],
        signature=_signature(directory, origin),
        build=build_facts(directory, manifest),
        memory=predict_memory(manifest, plan),
        capacity=cache_capacity(manifest.cache_groups, manifest.limits, lossy=lossy),
        plan=launched,
        costs=costs,
    )


def _signature(directory: Path, origin: Origin) -> str:
    if origin.verify_key is not None:
        return f"by the key of {origin.verify_key.name}"
    if (directory / SIGNATURE_FILE).is_file():
        return "there is one, not checked: give --verify-key"
    return "none"
