"""Builds checkpoints into engine directories, and decodes with them speculatively.

``from specbuild import Engine`` is all that decoding needs. Each name loads when it is first used,
so that ``import specbuild`` alone is free.
"""

TYPE_CHECKING = False  # as typing's, whose import would take longer than all of this
if TYPE_CHECKING:
    from specbuild.builder.speculative_config import EngineConfig, SpeculativeConfig
    from specbuild.runtime import errors as errors
    from specbuild.runtime.decode.decoder import DraftSetting
    from specbuild.runtime.engine import Engine
    from specbuild.runtime.guides.guide import Guide
    from specbuild.runtime.request import GenerateParams, Prompt
    from specbuild.runtime.settings import PrefillSchedule, RuntimeSettings

    __version__: str

__all__ = [
    "DraftSetting",
    "Engine",
    "EngineConfig",
    "GenerateParams",
    "Guide",
    "PrefillSchedule",
    "Prompt",
    "RuntimeSettings",
    "SpeculativeConfig",
    "__version__",
    "errors",
]

_HOMES = {
    "DraftSetting": "specbuild.runtime.decode.decoder",
    "Engine": "specbuild.runtime.engine",
    "EngineConfig": "specbuild.builder.speculative_config",
    "GenerateParams": "specbuild.runtime.request",
    "Guide": "specbuild.runtime.guides.guide",
    "PrefillSchedule": "specbuild.runtime.settings",
    "Prompt": "specbuild.runtime.request",
    "RuntimeSettings": "specbuild.runtime.settings",
    "SpeculativeConfig": "specbuild.builder.speculative_config",
}


if not TYPE_CHECKING:  # a checker would take any name for one of this package

    def __getattr__(name: str) -> object:
        """Loads the public ``name``; AttributeError where there is none."""
        if name == "__version__":
            from importlib.metadata import version

            return globals().setdefault(name, version("specbuild"))
        from importlib import import_module

        if name == "errors":
            return globals().setdefault(name, import_module("specbuild.runtime.errors"))
        if name in _HOMES:
            return globals().setdefault(name, getattr(import_module(_HOMES[name]), name))
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
