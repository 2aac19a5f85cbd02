"""Options of a run for an engine's lossy modes, within what was built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.options import DsaOptions, SpecPvOptions
from specbuild.runtime.errors import SpecbuildError


def _blocks(flag: str, text: str) -> int | Literal["auto"]:
    """Return ``auto`` or a number; the engine checks its range."""
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise SpecbuildError(f"{flag} is {text!r}, expected a number of blocks or 'auto'")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class SpecPvRequest(OptionGroup):
    """SpecPV options of a run; None retrieves as much as the engine supports."""

    PREFIX: ClassVar[str] = SpecPvOptions.PREFIX
    PANEL: ClassVar[str] = SpecPvOptions.PANEL

    retrieval_blocks: Annotated[
        int | Literal["auto"] | None,
        Described(
            "Blocks that a partial view retrieves, up to the engine's limit; 0 uses "
            "full steps only.",
            "N|auto",
            shown="the engine's limit",
            typed=str,
            read=_blocks,
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class DsaRequest(OptionGroup):
    """DSA options of a run; None selects as many tokens as the engine supports."""

    PREFIX: ClassVar[str] = DsaOptions.PREFIX
    PANEL: ClassVar[str] = DsaOptions.PANEL

    top_k: Annotated[
        int | None,
        Described(
            "Tokens that a row attends to, up to the engine's limit; 0 attends to all.",
            "N",
            least=0,
            shown="the engine's limit",
        ),
    ] = None
