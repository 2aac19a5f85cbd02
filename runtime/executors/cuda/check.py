"""Checks whether a plan runs on this machine's GPU, and lists the reasons if not."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import PLAN_FILE, Plan
from specbuild.runtime.engine_dir.rebuild import naming_build_command
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import OutdatedEngineError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.driver import gpu_count, open_gpu
from specbuild.runtime.executors.cuda.gpu import Gpu, GpuFacts
from specbuild.runtime.executors.cuda.memory import lack_of_memory
from specbuild.runtime.executors.cuda.plan_check import check_plan

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")


def read_plan(directory: Path, manifest: Manifest) -> Plan:
    """Return the engine's plan, checked against the manifest. Raises EngineFileError."""
    data = bytes(read_file(directory, manifest, PLAN_FILE))
    with naming_build_command(directory, manifest):
        try:
            plan = from_json(Plan, json.loads(data), PLAN_FILE)
            check_plan(plan, manifest)
        except (SpecbuildError, ValueError, RecursionError) as error:
            raise OutdatedEngineError.of(directory, error) from error
    return plan


def gpu_reasons(plan: Plan, gpu: Gpu) -> list[str]:
    """Return all reasons why the plan does not run on this GPU; empty if it does."""
    facts = gpu.facts
    reasons = []
    if not _runs(plan.gpu, facts.capability):
        reasons.append(
            f"it was built for {plan.gpu}, this GPU ({facts.name}) is {_gpu_text(facts)}; build it "
            "with the --gpu of this machine"
        )
    elif facts.multiprocessors < plan.multiprocessors:
        reasons.append(
            f"it was built for {plan.multiprocessors} multiprocessors, this GPU ({facts.name}) has "
            f"{facts.multiprocessors}; run it on a whole GPU"
        )
    if facts.driver_version < plan.driver_version:
        reasons.append(
            f"the driver is for CUDA {_version(facts.driver_version)}, "
            f"{_version(plan.driver_version)} or later is needed; install a newer driver"
        )
    lack = lack_of_memory(plan, gpu.free_bytes())
    if lack is not None:
        reasons.append(lack)
    return reasons


def ranked_reasons(plan: Plan, gpus: Sequence[Gpu], numbers: Sequence[int]) -> list[str]:
    """Return all reasons why a plan of several ranks does not run on these GPUs."""
    reasons = []
    for number, gpu in zip(numbers, gpus, strict=True):
        gpu.use()
        reasons += [f"GPU {number}: {reason}" for reason in gpu_reasons(plan, gpu)]
    first = gpus[0].facts
    for number, gpu in zip(numbers[1:], gpus[1:], strict=True):
        if (gpu.facts.name, gpu.facts.capability) != (first.name, first.capability):
            reasons.append(
                f"GPU {numbers[0]} is an {first.name}, GPU {number} an {gpu.facts.name}; an "
                "engine's GPUs must be alike"
            )
    for i, gpu in enumerate(gpus):
        for j in range(i):
            if not (gpu.reaches(gpus[j]) and gpus[j].reaches(gpu)):
                reasons.append(
                    f"GPU {numbers[j]} and GPU {numbers[i]} cannot read each other's memory (no "
                    "NVLink, MIG, or a virtual machine that forbids it); choose others with "
                    "--device"
                )
    return reasons


def reasons_here(directory: Path, manifest: Manifest, _here: Device) -> list[str]:
    """Return the same for this machine's first GPUs, which are released afterwards."""
    plan = read_plan(directory, manifest)
    gpus: list[Gpu] = []
    try:
        if plan.ranks == 1:
            gpus.append(open_gpu())
            return gpu_reasons(plan, gpus[0])
        count = gpu_count()
        if count < plan.ranks:
            return [f"{directory} runs on {plan.ranks} GPUs, this machine shows {count}"]
        gpus += map(open_gpu, range(plan.ranks))
        return ranked_reasons(plan, gpus, range(plan.ranks))
    except UnsupportedHereError as error:
        return [str(error)]
    finally:
        for gpu in gpus:
            gpu.close()


def _runs(built_for: str, capability: tuple[int, int]) -> bool:
    """Return whether code runs: sm_XYa on XY only, other code on all later X.Z."""
    match = _ARCHITECTURE.fullmatch(built_for)
    if match is None:
        return False
    required = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return capability == required
    return capability[0] == required[0] and capability[1] >= required[1]


def _gpu_text(facts: GpuFacts) -> str:
    return "sm_{}{}".format(*facts.capability)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
