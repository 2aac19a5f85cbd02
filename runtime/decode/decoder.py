"""What an engine decodes with: a loop on the host, or steps that stay on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol, TypeAlias

from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.draft.eagle3 import Drafter
from specbuild.runtime.draft.policy import DraftPolicy
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import Event, Request

Speculation: TypeAlias = DraftShape | Literal["default"] | None


class Decoder(Protocol):
    """Serves checked requests. The tokens are the same with any speculation."""

    @property
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""
        ...

    def generate(
        self,
        requests: Sequence[Request],
        *,
        speculation: Speculation,
        drafter: Drafter | None,
        text_stream: TextStreams,
    ) -> Iterator[Event]:
        """The events of all requests; RequestError at once where the draft cannot be had."""
        ...
