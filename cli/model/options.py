"""The argument MODEL, and the options by which a command builds an engine of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import typer

from specbuild.builder.kernel_options import KernelOptions
from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.options import BuildOptions, DraftStorageOptions, LimitOptions
from specbuild.builder.speculative_config import EngineConfig
from specbuild.cli.terminal import machine
from specbuild.cli.terminal.console import messages

_PANEL = "Building MODEL (if it is not an engine)"

ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Engine directory, checkpoint directory, GGUF file, or Hugging Face id "
        "(ORGANISATION/NAME, for one GGUF file of several ORGANISATION/NAME:Q4_K_M).",
    ),
]


@dataclass(frozen=True, kw_only=True)
class _Limits(LimitOptions):
    PANEL: ClassVar[str] = _PANEL


@dataclass(frozen=True, kw_only=True)
class _DraftStorage(DraftStorageOptions):
    PREFIX: ClassVar[str] = "draft"
    PANEL: ClassVar[str] = _PANEL


@dataclass(frozen=True, kw_only=True)
class _Kernels(KernelOptions):
    PANEL: ClassVar[str] = _PANEL


@dataclass(frozen=True, kw_only=True)
class ModelBuildOptions(OptionGroup):
    """Options of a build that a command makes of MODEL; they are part of the cached engine's key.

    The other options of ``specbuild build`` are read from the section ``build`` of ``--config``.
    """

    PANEL: ClassVar[str] = _PANEL

    revision: Annotated[
        str | None,
        Described("Branch, tag or commit on Hugging Face.", "REVISION", shown="main"),
    ] = None
    draft: Annotated[
        str | None,
        Described(
            "Draft model: checkpoint directory or Hugging Face id; mtp: the model's own MTP layer.",
            "DRAFT",
            shown="none",
        ),
    ] = None
    backend: Annotated[
        Literal["cpu", "cuda"] | None,
        Described(
            "Backend of the engine.", "NAME", shown="cuda if a supported GPU is visible, else cpu"
        ),
    ] = None
    gpu: Annotated[
        str | None, Described("GPU architecture: h100, h200 or sm_90a.", "GPU", shown="h100")
    ] = None
    tensor_parallel: Annotated[
        int | None,
        Described(
            "Number of GPUs that run the engine together, with --backend cuda: 1, 2, 4 or 8.",
            "N",
            least=1,
            shown="1",
        ),
    ] = None
    no_mla: Annotated[bool, Described("Ignore mla_kv.safetensors and cache keys and values.")] = (
        False
    )
    limits: _Limits = _Limits()
    draft_storage: _DraftStorage = _DraftStorage()
    kernels: _Kernels = _Kernels()

    def stated(self) -> dict[str, object]:
        """Return the options that differ from their defaults, by their flat names."""
        defaults = type(self)().flat()
        return {name: value for name, value in self.flat().items() if value != defaults[name]}


def build_options(
    stated: dict[str, object], config: EngineConfig | None, *, model: Path, output: Path
) -> BuildOptions:
    """Return the options of the build: those that are ``stated``, else those of the file.

    Raises SpecbuildError for an option of the file's section ``build`` that is unknown.
    """
    config = EngineConfig() if config is None else config
    all_options = {option.name: option for option in BuildOptions.options()}
    texts = {
        name: str(v) if all_options[name].described.typed is str else v
        for name, v in stated.items()
    }
    texts_by_name = {"model": str(model), "output": str(output)} | texts
    section = dict(config.sections.get("build", {})) | texts_by_name
    shared = {name: value for name, value in config.options.items() if name in all_options}
    if "backend" not in shared | section:
        section["backend"] = default_backend()
    return replace(config, options=shared, sections={"build": section}).build_options()


def default_backend() -> str:
    """Return ``cuda`` if a supported GPU is visible and usable, else ``cpu``."""
    if not machine.has_supported_gpu():
        return "cpu"
    missing = [p for p in ("cuda-bindings", "nvidia-cuda-nvrtc") if not machine.package_version(p)]
    if missing:
        messages().print(
            f"a supported GPU is visible, but {missing[0]} is not installed: the CPU is used; "
            "pip install '.[cuda]' in the checkout for the GPU",
            soft_wrap=True,
        )
        return "cpu"
    return "cuda"
