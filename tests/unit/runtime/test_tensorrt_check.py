"""Reasons why TensorRT engines do not run here: one sentence each, without the library."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specbuild.builder.backends.registry import backend_of
from specbuild.builder.backends.tensorrt.library import Phases
from specbuild.builder.backends.tensorrt.options import (
    built_for,
)
from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.manifest import TensorRtBuild
from specbuild.runtime.errors import EngineFileError, SpecbuildError
from specbuild.runtime.executors.cuda.gpu import GpuFacts
from specbuild.runtime.executors.tensorrt import check
from specbuild.runtime.executors.tensorrt.check import (
    LIBRARIES,
    capability_reason,
    library_reason,
    read_header,
)

BUILD = TensorRtBuild("tensorrt_rtx", "1.7.1.116", ("sm_89", "sm_120"))


def header(version: tuple[int, ...] = (1, 7, 1, 116), mask: int = 0b011000) -> bytes:
    size = (12345).to_bytes(8, "little")
    tag = b"vtrt"
    return tag + bytes(12) + size + bytes(version) + tag + mask.to_bytes(4, "little") + bytes(28)


def gpu(major: int, minor: int) -> GpuFacts:
    return GpuFacts("some GPU", (major, minor), 100, 13000, 1 << 34)


def test_a_header_has_the_library_version_and_gpu() -> None:
    found = read_header(header(), "plan")
    assert found.version == "1.7.1.116"
    assert found.compute_capabilities == ("sm_89", "sm_120")
    assert found.engine_bytes == 12345


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header()[:63], "no TensorRT-RTX engine"),
        (b"ONNX" + header()[4:], "no TensorRT-RTX engine"),
        (header(mask=1 << 6), "does not know"),
    ],
)
def test_rejects_invalid_headers(data: bytes, message: str) -> None:
    with pytest.raises(EngineFileError, match=message):
        read_header(data, "plan")


@pytest.mark.parametrize("backend", sorted(LIBRARIES))
def test_the_error_of_a_missing_library_has_the_install_command(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = LIBRARIES[backend]
    for found, said in ((None, "is not installed"), ("0.9.1", "is 0.9.1, ")):
        monkeypatch.setattr(check, "installed_version", lambda _, found=found: found)
        reason = library_reason(backend)
        assert reason is not None and said in reason and facts.install in reason
    newest = ".".join(map(str, facts.least_version)) + ".3+cu13"
    monkeypatch.setattr(check, "installed_version", lambda _: newest)
    assert library_reason(backend) is None


def test_the_gpu_must_be_one_that_was_built_for() -> None:
    assert capability_reason(BUILD, gpu(8, 9)) is None
    assert capability_reason(BUILD, gpu(12, 0)) is None
    reason = capability_reason(BUILD, gpu(8, 6))
    assert reason is not None and "sm_89, sm_120" in reason and "build it for sm_86" in reason


@pytest.mark.parametrize(
    ("there", "compatible", "here", "fits"),
    [
        ("10.16.1", False, "10.16.1", True),
        ("10.16.1", False, "10.16.2", False),
        ("10.16.1", True, "10.17.0", True),
        ("10.16.1", True, "10.9.0", False),
    ],
)
def test_reports_engines_of_another_version(
    there: str, compatible: bool, here: str, fits: bool
) -> None:
    build = TensorRtBuild("tensorrt", there, ("sm_90",), version_compatible=compatible)
    reasons = check._version_reasons(LIBRARIES["tensorrt"], build, here)
    assert not reasons if fits else [there in r and here in r for r in reasons] == [True]


def test_the_error_names_a_missing_or_different_plugin() -> None:
    build = replace(BUILD, plugins={"KvWrite": "1.a", "Moe": "1.b", "Linear": "1.c"})
    reasons = check._plugin_reasons(build, {"KvWrite": "1.a", "Moe": "1.x"})
    assert len(reasons) == 2
    assert "Linear is of version 1.c, this specbuild has none" in reasons[0]
    assert "Moe is of version 1.b, this specbuild has 1.x" in reasons[1]


def options(**changes: object) -> BuildOptions:
    from pathlib import Path

    return BuildOptions.from_flat(model=Path("m"), output=Path("o"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version_compatible": True}, "--version-compatible needs --backend tensorrt"),
        ({"backend": "cuda", "weight_streaming": True}, "--weight-streaming needs"),
        ({"hardware_compatible": True}, "--hardware-compatible needs --backend tensorrt"),
        ({"backend": "tensorrt-rtx", "hardware_compatible": True}, "use --gpu to list the GPUs"),
        ({"strip_weights": True}, "--strip-weights needs --backend tensorrt"),
        (
            {"backend": "tensorrt-rtx", "strip_weights": True, "weight_streaming": True},
            "--strip-weights removes them",
        ),
        ({"backend": "tensorrt-rtx", "version_compatible": True}, "no lean runtime"),
        ({"backend": "tensorrt-rtx", "draft_dtype": "fp8"}, "--draft-dtype fp8 needs"),
        ({"backend": "tensorrt", "weights_dtype": "fp8"}, "--weights-dtype fp8 needs"),
        ({"backend": "tensorrt-rtx", "tuned_only": True}, "does not run specbuild.s kernels"),
    ],
)
def test_rejects_options_of_another_backend(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SpecbuildError, match=message):
        backend_of(options(**changes).backend).options(options(**changes))


@pytest.mark.parametrize("name", ["sm_75", "sm_90a", "sm_89,h100", ""])
def test_rejects_an_unsupported_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "installed_version", lambda _: "1.7.1.116")
    if not name:
        assert built_for(options(backend="tensorrt-rtx")) == "sm_120"
        asked = options(backend="tensorrt-rtx", gpu="sm_120,sm_86,sm_86")
        assert built_for(asked) == "sm_86,sm_120"
        return
    with pytest.raises(SpecbuildError, match=r"--gpu .*: got .*, but TensorRT-RTX builds"):
        built_for(options(backend="tensorrt-rtx", gpu=name))


def test_progress_of_nested_phases_only_rises() -> None:
    told: list[float] = []
    phases = Phases(told.append)
    phases.start("build", None, 4)
    phases.step("build")
    phases.start("inner", "build", 2)
    phases.step("inner")
    phases.step("inner")
    phases.finish("inner")
    phases.step("build")
    phases.step("nobody's")
    phases.start("late", "build", 0)
    phases.step("late")
    for _ in range(5):
        phases.step("build")
    assert told == [0.25, 0.375, 0.5, 0.75, 1.0]
    assert told == sorted(told)
