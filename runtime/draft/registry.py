"""The drafters that the runtime knows, by the manifest's ``kind``: one line here, one file beside.

Which of them a run takes is a name: that of a kind, ``auto`` or ``none``.
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
# What a run may ask for beside a kind: whatever pays, or no draft.
AUTO = "auto"
NONE = "none"
NAMES = (AUTO, *MODEL_KINDS, *HOST_KINDS, NONE)


def kind_of(record: DrafterRecord) -> DrafterKind | HostDrafterKind:
    """The kind of an engine's drafter."""
    if isinstance(record, HostRecord):
        return HOST_KINDS[record.kind]
    return MODEL_KINDS[record.kind]


def open_host_drafter(record: HostRecord) -> HostDrafter:
    """A drafter that proposes on the host, of an engine's record."""
    return HOST_KINDS[record.kind].open(record)


def drafter_named(manifest: Manifest, name: str) -> DrafterRecord | None:
    """The engine's drafter of this name; its first one for ``auto``, None where it has none.

    RequestError where the engine was built without a drafter of this name.
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
    """What proposes under this name: draft models, and the drafter that proposes on the host.

    Under ``auto`` all of the engine's, else the one of the name alone.
    """
    requested = drafter_named(manifest, name)
    named = manifest.drafters if name == AUTO else ([] if requested is None else [requested])
    models = tuple(d for d in named if isinstance(d, ModelRecord))
    return models, next((d for d in named if isinstance(d, HostRecord)), None)
