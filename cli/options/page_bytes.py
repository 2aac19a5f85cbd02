"""The expected page sizes of caches: an engine with other sizes is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from specbuild.builder.option_group import Described, OptionGroup
from specbuild.builder.option_readers import repeated
from specbuild.cli.options.shared import GENERAL
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.cli.tables.predicted_memory import PredictedMemory
    from specbuild.runtime.engine_dir.manifest import CacheGroup


@dataclass(frozen=True, kw_only=True)
class PageOptions(OptionGroup):
    """Expected sizes, for deployments that were planned with a certain page size."""

    PANEL: ClassVar[str] = GENERAL

    page_bytes: Annotated[
        tuple[str, ...],
        Described(
            "Required bytes per page of a cache group; repeatable.",
            "GROUP=N",
            typed=list[str],
            read=repeated,
        ),
    ] = ()

    def check(self, groups: Sequence[CacheGroup], memory: PredictedMemory) -> None:
        """Raise SpecbuildError if a group has another size, or does not exist."""
        page_bytes = memory.page_bytes
        by_name = {group.name: group for group in groups}
        for text in self.page_bytes:
            name, equals, number = text.partition("=")
            if not equals or not number.isascii() or not number.isdigit():
                raise SpecbuildError(f"--page-bytes {text}: expected GROUP=N, such as full=1572864")
            if name not in page_bytes:
                group_names = ", ".join(page_bytes)
                raise SpecbuildError(
                    f"--page-bytes {text}: the engine's cache groups are {group_names}"
                )
            if int(number) != page_bytes[name]:
                raise SpecbuildError(
                    f"--page-bytes {text}: a page of {name} takes {page_bytes[name]} bytes "
                    f"({_geometry(by_name[name])}); plan with that, or build the engine that was "
                    "planned for"
                )


def _geometry(group: CacheGroup) -> str:
    layers = f"{len(group.layers)} {'layer' if len(group.layers) == 1 else 'layers'}"
    heads = f"{group.kv_heads} KV {'head' if group.kv_heads == 1 else 'heads'}"
    return f"{group.page_size} tokens, {layers}, {heads}, {group.dtype}"
