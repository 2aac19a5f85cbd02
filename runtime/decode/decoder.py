"""What an engine decodes with: a loop on the host, or steps that stay on a device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from specbuild.runtime.decode.emission import TextStreams
from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.decode.program_table import needs_full_logits
from specbuild.runtime.draft.eagle3 import Drafter
from specbuild.runtime.draft.policy import DraftPolicy
from specbuild.runtime.engine_dir.manifest import DraftShape
from specbuild.runtime.request import Event, Request

Speculation: TypeAlias = DraftShape | Literal["default"] | None


@dataclass(frozen=True)
class RequestKinds:
    """What the requests of a loop may ask for: what it drafts and how many it runs depend on it.

    ``sampled``: a temperature above 0; ``full_logits``: top-k or top-p.
    """

    sampled: bool = False
    full_logits: bool = False


def kinds_of(requests: Sequence[Request]) -> RequestKinds:
    """What these requests ask for."""
    sampling = [request.params.sampling for request in requests]
    return RequestKinds(
        sampled=any(params.temperature > 0 for params in sampling),
        full_logits=needs_full_logits(sampling),
    )


class Decoder(Protocol):
    """Serves checked requests. The tokens are the same with any speculation."""

    @property
    def default_draft(self) -> DraftPolicy:
        """What ``speculation="default"`` last used; its ``reason`` says what it chose, and why."""
        ...

    def loop(
        self,
        kinds: RequestKinds,
        *,
        speculation: Speculation,
        drafter: Drafter | None = None,
        text_stream: TextStreams,
    ) -> Loop:
        """A loop that requests join and leave; RequestError where the draft cannot be had."""
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
