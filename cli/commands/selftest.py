"""``specbuild selftest``: run an engine's own checks on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbuild.cli.options.shared import Debug, EngineDirectory, Json, Pin, VerifyKey

if TYPE_CHECKING:
    from rich.console import Group

    from specbuild.runtime.engine import Engine
    from specbuild.runtime.engine_dir.manifest import Manifest
    from specbuild.runtime.measure.selftest import SelfCheck

EXIT_NOT_SOUND = 1
# Tokens and prompt of the timed step, which reads mainly weights, not caches.
_TIMED_CONTEXT = 256


@dataclass(frozen=True)
class StepSpeed:
    """One sequence without a draft, and the memory bandwidth, in bytes per second.

    ``read_bytes_per_s`` is the minimum bytes of a step divided by its time, None on the host.
    ``streaming_bytes_per_s`` is a plain read of the same memory, None without the compiler of its
    kernel.
    """

    tokens_per_s: float
    read_bytes_per_s: float | None = None
    streaming_bytes_per_s: float | None = None


@dataclass(frozen=True)
class SelfTestReport:
    """The result of a self-test; ``reasons`` explain why the engine cannot run here."""

    engine: str
    backend: str
    machine: str
    sound: bool
    checks: tuple[SelfCheck, ...] = ()
    speed: StepSpeed | None = None
    reasons: tuple[str, ...] = ()


def selftest(
    engine: EngineDirectory,
    verify_key: VerifyKey = None,
    pin: Pin = None,
    as_json: Json = False,
    _debug: Debug = False,
) -> None:
    """Load an engine and check its output and speed on this machine.

    Needs only the engine. In about ten seconds it compares runs that must agree:
    the same prompts again, alone and in batches, read as a prompt and decoded, with
    each draft and without one. On a GPU the bits must be equal. Then it times one
    sequence; on a GPU, next to a streaming read of its memory.

    [b]check[/b] loads nothing; [b]verify[/b] compares an engine with its checkpoint.
    Exit code 0: all checks passed. 1: a check failed, or the engine is intact but
    cannot run here. 2: not an engine, or damaged.

    \b
    Examples:
    specbuild selftest engine
    specbuild selftest engine --json
    """
    from specbuild.cli.terminal import console
    from specbuild.runtime.engine_dir.files import check_sizes, read_manifest
    from specbuild.runtime.engine_dir.origin import Origin

    manifest = read_manifest(engine, Origin(verify_key, pin))
    check_sizes(engine, manifest)
    report = _test(engine, manifest)
    if as_json:
        print(console.json_line(report))
    else:
        console.output().print(report_screen(report))
    if not report.sound:
        raise typer.Exit(EXIT_NOT_SOUND)


def _test(directory: Path, manifest: Manifest) -> SelfTestReport:
    from specbuild.cli.terminal.engine_loading import load_engine
    from specbuild.cli.terminal.machine import nvidia_driver
    from specbuild.runtime.device import this_device
    from specbuild.runtime.engine_dir.backends import facts_of
    from specbuild.runtime.errors import UnsupportedHereError
    from specbuild.runtime.executors.registry import check_here

    machine = this_device().cpu_name
    driver = nvidia_driver()
    if facts_of(manifest.backend).on_gpu and driver is not None:
        machine = f"driver for CUDA {driver.cuda_version}"
    reasons = check_here(manifest, directory)
    if not reasons:
        try:
            loaded = load_engine(directory)
        except UnsupportedHereError as error:
            reasons = [str(error)]
        else:
            with loaded:
                return _report(directory, loaded, machine)
    return SelfTestReport(
        str(directory), manifest.backend, machine, sound=False, reasons=tuple(reasons)
    )


def _report(directory: Path, engine: Engine, machine: str) -> SelfTestReport:
    from specbuild.cli.terminal.console import messages
    from specbuild.runtime.executors.cuda.executor import CudaExecutor
    from specbuild.runtime.measure.selftest import SelfCheck, run_checks

    def say(line: str) -> None:
        messages().print(line, soft_wrap=True)

    if isinstance(engine.executor, CudaExecutor):
        machine = f"{engine.executor.runner.gpu.facts.name}, {machine}"
    files = SelfCheck("checksums of the files", f"{len(engine.manifest.files)} files", True)
    checks = (files, *run_checks(engine, say))
    return SelfTestReport(
        str(directory),
        engine.manifest.backend,
        machine,
        sound=all(check.passed is not False for check in checks),
        checks=checks,
        speed=_speed(engine),
    )


def _speed(engine: Engine) -> StepSpeed:
    """Time a step of one sequence on a CUDA engine, else the tokens of one sequence."""
    from specbuild.runtime.device import this_device
    from specbuild.runtime.errors import SpecbuildError
    from specbuild.runtime.executors.cuda.executor import CudaExecutor
    from specbuild.runtime.measure.benchmark_batch import benchmark_batch
    from specbuild.runtime.measure.byte_floor import Work, engine_traffic
    from specbuild.runtime.measure.read_speed import host_streaming_read
    from specbuild.runtime.measure.selftest import tokens_per_s
    from specbuild.runtime.measure.step_timing import measure_step

    executor = engine.executor
    if not isinstance(executor, CudaExecutor):
        threads = this_device().physical_cores
        return StepSpeed(tokens_per_s(engine), None, host_streaming_read(threads))
    context = min(_TIMED_CONTEXT, engine.manifest.limits.max_seq_len // 2)
    with benchmark_batch(engine, batch=1, context=context, shape=None) as placed:
        step = measure_step(engine, placed, None)
    traffic = engine_traffic(executor.plan, executor.runner.described).target
    floor = traffic.bytes_read(Work(1, 1, step.context, experts=step.experts)).total
    try:
        from specbuild.cli.bench.sweep import ceiling_of

        streaming = ceiling_of(engine)
    except (ImportError, SpecbuildError):
        streaming = None
    return StepSpeed(1 / step.step_s, floor / step.step_s, streaming)


def report_screen(report: SelfTestReport) -> Group:
    """Print the report in at most one screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines = [Text(f"{report.engine}, {report.backend}, on {report.machine}")]
    if report.reasons:
        reasons = [Text(f"- {reason}") for reason in report.reasons]
        return Group(*lines, Text("The engine cannot run on this machine:"), *reasons)
    table = Table()
    table.add_column("check")
    table.add_column("found", overflow="fold")
    table.add_column("")
    for check in report.checks:
        table.add_row(check.name, check.detail, _verdict(check.passed))
    failed = sum(check.passed is False for check in report.checks)
    verdict = (
        Text("sound: this machine, driver and engine work together", style="green")
        if report.sound
        else Text(f"not sound: {failed} of {len(report.checks)} checks failed", style="red")
    )
    assert report.speed is not None
    return Group(*lines, table, Text(speed_text(report.speed)), verdict)


def speed_text(speed: StepSpeed) -> str:
    """Return the speed of one sequence in a sentence."""
    text = f"one sequence, no draft: {speed.tokens_per_s:.1f} tokens/s"
    streaming = speed.streaming_bytes_per_s
    if speed.read_bytes_per_s is None:
        return text if streaming is None else f"{text}; a streaming read: {_rate(streaming)}"
    text += f", at least {_rate(speed.read_bytes_per_s)}"
    if streaming is None:
        return f"{text}; no streaming read: its kernel needs nvidia-cuda-nvrtc"
    share = speed.read_bytes_per_s / streaming
    return f"{text}, {share:.0%} of a streaming read ({_rate(streaming)})"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.0f} GB/s"


def _verdict(passed: bool | None) -> str:
    return "skipped" if passed is None else "ok" if passed else "failed"
