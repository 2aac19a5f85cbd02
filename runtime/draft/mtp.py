"""MTP layers: they draft level by level, and their graphs have the roles of EAGLE3."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from specbuild.runtime.draft.drafter import DrafterKind
from specbuild.runtime.draft.eagle3 import EAGLE3, Eagle3Drafter

_CAPABILITIES = replace(EAGLE3.capabilities, name="mtp")

MTP = DrafterKind(_CAPABILITIES, partial(Eagle3Drafter, capabilities=_CAPABILITIES))
