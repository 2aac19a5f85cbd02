"""What an engine decodes with: loops over steps of the host, or of a device."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.draft.eagle3 import Drafter
from specbuild.runtime.draft.policy import DraftPolicy
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import Request

Speculation: TypeAlias = DraftShape | Literal["default"] | None


@dataclass(frozen=True, eq=False)
class DraftSetting:
    """How requests draft: those of one loop draft alike. The tokens are the same with any.

    ``speculation``: a shape, None for no draft, or "default" for what pays; ``drafter`` stands for
    the engine's own.
    """

    speculation: Speculation = "default"
    drafter: Drafter | None = None

    def same_as(self, other: DraftSetting) -> bool:
        """Whether requests of both may share a loop."""
        return self.speculation == other.speculation and self.drafter is other.drafter

    def of(self, requests: Sequence[Request]) -> DraftSetting:
        """What these requests draft with: nothing, where one of them is exact.

        RequestError where such a request asks for a draft.
        """
        if self.speculation is None or not any(request.params.exact for request in requests):
            return self
        if self.speculation != "default" or self.drafter is not None:
            raise RequestError("exact decodes without a draft: leave speculation and drafter out")
        return DraftSetting(None)


class Decoder(Protocol):
    """Makes the loops that serve checked requests, one at a time."""

    machine: threading.Lock
    """Held by whoever uses the executor: a loop, a measurement, a scoring."""

    @property
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""
        ...

    def check(self, requests: Sequence[Request], setting: DraftSetting) -> None:
        """RequestError where the engine has no such draft, or no steps for such requests."""
        ...

    def loop(self, setting: DraftSetting, *, text_stream: TextStreams) -> Loop:
        """A loop of this setting; whoever runs it holds :attr:`machine`."""
        ...
