"""Every kind of drafter that the runtime can run: one file beside this one, and one line here.

A run names the kind that it uses, or ``auto`` or ``none``.
"""

from __future__ import annotations

from specbuild.runtime.draft.dflash import DFLASH
from specbuild.runtime.draft.drafter import DrafterKind, HostDrafter, HostDrafterKind
from specbuild.runtime.draft.eagle3 import EAGLE3
from specbuild.runtime.draft.mtp import MTP
from specbuild.runtime.draft.p_eagle import P_EAGLE
from specbuild.runtime.draft.suffix import SUFFIX
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord, HostRecord, ModelRecord
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError

MODEL_KINDS: dict[str, DrafterKind] = {kind.name: kind for kind in (EAGLE3, P_EAGLE, DFLASH, MTP)}
HOST_KINDS: dict[str, HostDrafterKind] = {kind.name: kind for kind in (SUFFIX,)}
# Names beside the kinds: the fastest by measurement, or no draft.
AUTO = "auto"
NONE = "none"
NAMES = (AUTO, *MODEL_KINDS, *HOST_KINDS, NONE)


def kind_of(record: DrafterRecord) -> DrafterKind | HostDrafterKind:
    """Return the declaration of a record's kind."""
    if isinstance(record, HostRecord):
        return HOST_KINDS[record.kind]
    return MODEL_KINDS[record.kind]


def open_host_drafter(record: HostRecord) -> HostDrafter:
    """Return a new host drafter of an engine's record."""
    return HOST_KINDS[record.kind].open(record)


def drafter_named(manifest: Manifest, name: str) -> DrafterRecord | None:
    """Return the engine's drafter of this name; for ``auto`` the first one, or None.

    Raises RequestError if the engine has no drafter of this name.
    """
    if name == AUTO:
        return next(iter(manifest.drafters), None)
    found = next((drafter for drafter in manifest.drafters if drafter.kind == name), None)
    if found is None:
        built = ", ".join(drafter.kind for drafter in manifest.drafters)
        has = f"the engine has {built}" if built else "the engine has no drafter"
        other = ", ".join((AUTO, *(drafter.kind for drafter in manifest.drafters), NONE))
        raise RequestError(f"drafter {name!r}: {has}; ask for one of {other}")
    return found


def sources(manifest: Manifest, name: str) -> tuple[tuple[ModelRecord, ...], HostRecord | None]:
    """Return the draft models and the host drafter that a name selects.

    ``auto`` selects all drafters of the engine, another name a single one.
    """
    requested = drafter_named(manifest, name)
    named = manifest.drafters if name == AUTO else ([] if requested is None else [requested])
    models = tuple(d for d in named if isinstance(d, ModelRecord))
    return models, next((d for d in named if isinstance(d, HostRecord)), None)
