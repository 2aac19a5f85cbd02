"""Whether a plan runs on this machine's GPU: every reason why not, with the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

from specbuild.runtime.device import Device
from specbuild.runtime.engine_dir.files import read_file
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.engine_dir.plan import PLAN_FILE, Plan
from specbuild.runtime.engine_dir.strict_json import from_json
from specbuild.runtime.errors import EngineFileError, SpecbuildError, UnsupportedHereError
from specbuild.runtime.executors.cuda.driver import open_gpu
from specbuild.runtime.executors.cuda.gpu import Gpu, GpuFacts
from specbuild.runtime.executors.cuda.memory import lack_of_memory
from specbuild.runtime.executors.cuda.plan_check import check_plan

_ARCHITECTURE = re.compile(r"sm_(\d+)(\d)([af]?)")


def read_plan(directory: Path, manifest: Manifest) -> Plan:
    """The engine's plan, checked against the manifest. Raises EngineFileError."""
    data = bytes(read_file(directory, manifest, PLAN_FILE))
    try:
        plan = from_json(Plan, json.loads(data), PLAN_FILE)
        check_plan(plan, manifest)
    except (SpecbuildError, ValueError, RecursionError) as error:
        raise EngineFileError(f"{directory}: {error}; build the engine again") from error
    return plan


def gpu_reasons(plan: Plan, gpu: Gpu) -> list[str]:
    """Every reason why the plan does not run on this GPU; empty when it does."""
    facts = gpu.facts
    reasons = []
    if not _runs(plan.gpu, facts.capability):
        reasons.append(
            f"it was built for {plan.gpu}, this GPU ({facts.name}) is {_shown(facts)}; build it "
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


def reasons_here(directory: Path, manifest: Manifest, _here: Device) -> list[str]:
    """The same for this machine's first GPU, which is given back after."""
    plan = read_plan(directory, manifest)
    try:
        gpu = open_gpu()
    except UnsupportedHereError as error:
        return [str(error)]
    try:
        return gpu_reasons(plan, gpu)
    finally:
        gpu.close()


def _runs(built_for: str, capability: tuple[int, int]) -> bool:
    """Code for sm_XYa runs on XY only, other code on all later X.Z."""
    match = _ARCHITECTURE.fullmatch(built_for)
    if match is None:
        return False
    wanted = (int(match[1]), int(match[2]))
    if match[3] == "a":
        return capability == wanted
    return capability[0] == wanted[0] and capability[1] >= wanted[1]


def _shown(facts: GpuFacts) -> str:
    return "sm_{}{}".format(*facts.capability)


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
