"""Every kind of drafter in a manifest. Each kind has a file in this folder and one line here."""

from __future__ import annotations

from specbuild.runtime.engine_dir.drafters.dflash import DFlashRecord
from specbuild.runtime.engine_dir.drafters.eagle3 import Eagle3Record
from specbuild.runtime.engine_dir.drafters.gemma4_assistant import AssistantRecord
from specbuild.runtime.engine_dir.drafters.mtp import MtpRecord
from specbuild.runtime.engine_dir.drafters.p_eagle import PEagleRecord
from specbuild.runtime.engine_dir.drafters.record import (
    CHECKPOINT,
    DRAFT_GROUP,
    DrafterRecord,
    HostRecord,
    ModelRecord,
)
from specbuild.runtime.engine_dir.drafters.suffix import SuffixRecord

RECORDS: dict[str, type[DrafterRecord]] = DrafterRecord.MEMBERS
RECORDS |= {
    record.kind: record
    for record in (
        Eagle3Record,
        PEagleRecord,
        DFlashRecord,
        MtpRecord,
        AssistantRecord,
        SuffixRecord,
    )
}
MODEL_NAMES = tuple(kind for kind, record in RECORDS.items() if issubclass(record, ModelRecord))
HOST_NAMES = tuple(kind for kind, record in RECORDS.items() if issubclass(record, HostRecord))
# Values of --draft that name a layer of the target's own checkpoint.
TARGET_LAYERS = tuple(
    argument
    for record in RECORDS.values()
    if (argument := record.BUILD_ARGUMENT) not in (None, CHECKPOINT)
)
# Possible cache groups: that of the first draft model, then that of a further model of each kind.
DRAFT_GROUPS = (DRAFT_GROUP, *MODEL_NAMES)
