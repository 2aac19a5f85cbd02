"""Every kind of drafter that the runtime can run.

Each kind has a file in this folder and one line here. ``--drafter`` takes the name of a kind,
``auto`` or ``none``.
"""

from __future__ import annotations

from specbuild.runtime.draft.dflash import DFLASH
from specbuild.runtime.draft.drafter import DrafterKind, HostDrafter, HostDrafterKind
from specbuild.runtime.draft.eagle3 import EAGLE3
from specbuild.runtime.draft.gemma4_assistant import ASSISTANT
from specbuild.runtime.draft.mtp import MTP
from specbuild.runtime.draft.p_eagle import P_EAGLE
from specbuild.runtime.draft.suffix import SUFFIX
from specbuild.runtime.engine_dir.drafters.record import DrafterRecord, HostRecord, ModelRecord
from specbuild.runtime.engine_dir.manifest import Manifest
from specbuild.runtime.errors import RequestError

MODEL_KINDS: dict[str, DrafterKind] = {
    kind.name: kind for kind in (EAGLE3, P_EAGLE, DFLASH, MTP, ASSISTANT)
}
HOST_KINDS: dict[str, HostDrafterKind] = {kind.name: kind for kind in (SUFFIX,)}
# Further names: ``auto`` uses the drafter with the highest measured rate, ``none`` no draft.
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
    """Return the engine's drafter of this name.

    ``auto`` returns the first drafter; None if the engine has none.

    Raises RequestError if the engine has no drafter of this name.
    """
    if name == AUTO:
        return next(iter(manifest.drafters), None)
    record = next((drafter for drafter in manifest.drafters if drafter.kind == name), None)
    if record is None:
        kinds = ", ".join(drafter.kind for drafter in manifest.drafters)
        cause = f"the engine has {kinds}" if kinds else "the engine has no drafter"
        names = ", ".join((AUTO, *(drafter.kind for drafter in manifest.drafters), NONE))
        raise RequestError(f"drafter {name!r}: {cause}; use one of {names}")
    return record


def sources(manifest: Manifest, name: str) -> tuple[tuple[ModelRecord, ...], HostRecord | None]:
    """Return the draft models and the host drafter that a name selects.

    ``auto`` selects all drafters of the engine; any other name selects one.
    """
    requested = drafter_named(manifest, name)
    selected = manifest.drafters if name == AUTO else ([] if requested is None else [requested])
    models = tuple(d for d in selected if isinstance(d, ModelRecord))
    return models, next((d for d in selected if isinstance(d, HostRecord)), None)
