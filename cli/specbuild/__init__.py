"""Builds checkpoints into engine directories, and decodes with them speculatively.

Decoding needs only ``from specbuild import Engine``. Each name is loaded at its first use, so that
``import specbuild`` is fast.
"""

TYPE_CHECKING = False  # As in typing, whose import takes longer than the rest.
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


if not TYPE_CHECKING:  # A type checker would otherwise accept any name of this package.

    def __getattr__(name: str) -> object:
        """Load the public ``name``; AttributeError if it does not exist."""
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
