"""A decoding loop whose events are delivered to the streams of its requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from specbuild.runtime.decode.loop import Loop
from specbuild.runtime.request import Event, FinishEvent

if TYPE_CHECKING:
    from specbuild.runtime.decode.session import Stream


class ServedLoop:
    """A loop and the streams of its requests."""

    def __init__(self, loop: Loop) -> None:
        self.loop = loop
        self._owners: dict[int, tuple[Stream, int]] = {}

    @property
    def streams(self) -> list[Stream]:
        """The streams with unfinished requests."""
        return list({id(stream): stream for stream, _ in self._owners.values()}.values())

    def join(self, stream: Stream) -> None:
        """Add the requests of a stream to the loop."""
        for number, request in enumerate(stream.requests):
            self._owners[self.loop.add(request)] = (stream, number)

    def abort(self, stream: Stream) -> None:
        """Abort the unfinished requests of a stream."""
        own = [index for index, (owner, _) in self._owners.items() if owner is stream]
        ends = [self.loop.abort(index) for index in own]
        self.deliver([end for end in ends if end is not None])

    def deliver(self, events: Sequence[Event]) -> None:
        """Number the events of one turn as their streams do; deliver one batch per stream."""
        batches: dict[Stream, list[Event]] = {}
        for event in events:
            index = event.request
            stream, event.request = self._owners[index]
            batch = batches.get(stream)
            if batch is None:
                batches[stream] = [event]
            else:
                batch.append(event)
            if isinstance(event, FinishEvent):
                del self._owners[index]
        for stream, own_events in batches.items():
            stream.deliver(own_events)
