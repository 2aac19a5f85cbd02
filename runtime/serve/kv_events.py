"""Events of the prefix cache for routers, published on ZeroMQ in vLLM's format.

A message has three frames: the topic, a sequence number from 0 in eight bytes (big-endian), and
MessagePack of ``[time, events, null]``. Events are maps whose ``type`` is ``BlockStored``,
``BlockRemoved`` or ``AllBlocksCleared``. A block is a page of the target layers that attend to all
tokens.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import msgspec
import xxhash
import zmq

from specbuild.runtime.cache.prefix import PrefixCache
from specbuild.runtime.cache.prefix_tree import PrefixEntry
from specbuild.runtime.errors import RequestError

# Queued changes before the queue is replaced by the full state of the cache.
MAX_QUEUED_CHANGES = 1 << 16
# Messages that stay available for subscribers that missed some.
MAX_REPLAYED_MESSAGES = 10_000
# The sequence number of the message that ends a replay.
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_POLL_MS = 20


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True):
    """Consecutive blocks were stored after the block of ``parent_block_hash``.

    ``extra_keys`` has the cache salt of each block if the request has one.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True):
    """Blocks were removed."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks were removed."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """The events of one message; ``ts`` is the Unix time in seconds."""

    ts: float
    events: list[Event]
    data_parallel_rank: int | None = None


@dataclass(frozen=True)
class EventEndpoints:
    """ZeroMQ endpoints where events are published, and where they can be replayed."""

    endpoint: str
    replay: str | None = None
    topic: str = ""


@dataclass(frozen=True)
class _Change:
    """Pages ``first … end − 1`` of an entry were stored or removed; without an entry, all were
    removed.
    """

    entry: PrefixEntry | None
    first: int = 0
    end: int = 0
    stored: bool = False


class KvEventPublisher:
    """Publishes changes of a prefix cache in a thread of its own. The decoding thread queues them.

    If the queue is full, it is replaced by ``AllBlocksCleared`` and the full state of the cache.
    RequestError if an endpoint is not available.
    """

    def __init__(
        self, cache: PrefixCache, endpoints: EventEndpoints, *, max_queued: int = MAX_QUEUED_CHANGES
    ) -> None:
        self._cache = cache
        self._max_queued = max_queued
        # Larger than max_queued if the state of the cache itself has more entries.
        self._max_changes = max_queued
        self._changes: deque[_Change] = deque([_Change(None)])
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._topic = endpoints.topic.encode()
        self._publisher = self._bind(zmq.PUB, endpoints.endpoint)
        self._replay = (
            None if endpoints.replay is None else self._bind(zmq.ROUTER, endpoints.replay)
        )
        self._sent_messages: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_REPLAYED_MESSAGES)
        self._next_number = 0
        self._hashes_by_entry: WeakKeyDictionary[PrefixEntry, list[int]] = WeakKeyDictionary()
        self._encode: Callable[[EventBatch], bytes] = msgspec.msgpack.Encoder().encode
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._publish, name="specbuild-events", daemon=True)
        self._thread.start()
        cache.listener = self

    @property
    def endpoint(self) -> str:
        """The endpoint to which subscribers connect."""
        return _last_endpoint(self._publisher)

    @property
    def num_queued(self) -> int:
        """The number of changes that are not published yet."""
        return len(self._changes)

    @property
    def replay_endpoint(self) -> str | None:
        """The endpoint from which subscribers request missed messages."""
        return None if self._replay is None else _last_endpoint(self._replay)

    def stored(self, entry: PrefixEntry, first: int, end: int) -> None:
        """Queue an event of stored pages. Called by the engine's thread."""
        self._add(_Change(entry, first, end, stored=True))

    def removed(self, entry: PrefixEntry, index: int) -> None:
        """Queue an event of a removed page. Called by the engine's thread."""
        self._add(_Change(entry, index, index + 1))

    def close(self) -> None:
        """Publish the queued events and stop the thread."""
        self._cache.listener = None
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> KvEventPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _bind(self, socket_type: int, endpoint: str) -> zmq.Socket[bytes]:
        bound_socket = self._context.socket(socket_type)
        bound_socket.linger = 0
        try:
            bound_socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise RequestError(
                f"cannot publish events at {endpoint}: {error}; use an endpoint like tcp://127.0.0.1:5557"
            ) from error
        return bound_socket

    def _add(self, change: _Change) -> None:
        if len(self._changes) < self._max_changes:
            self._changes.append(change)
            return
        self._changes.clear()
        stored = [_Change(*span, stored=True) for span in self._cache.blocks()]
        self._changes.extend([_Change(None), *stored])
        self._max_changes = max(self._max_queued, 2 * len(stored))

    def _publish(self) -> None:
        """Publish queued events until closed. All events in the queue become one message."""
        try:
            while not self._closing.is_set():
                if self._replay is None:
                    self._closing.wait(_POLL_MS / 1e3)
                elif self._replay.poll(_POLL_MS):
                    self._replay_messages(self._replay)
                self._send_queued()
            self._send_queued()
        finally:
            self._context.destroy(linger=1000)

    def _send_queued(self) -> None:
        events = list(self._take_events())
        if not events:
            return
        payload = self._encode(EventBatch(time.time(), events))
        number = self._next_number.to_bytes(8, "big")
        self._next_number += 1
        self._sent_messages.append((number, payload))
        self._publisher.send_multipart((self._topic, number, payload))

    def _replay_messages(self, replay: zmq.Socket[bytes]) -> None:
        """Answer ``[empty, number]`` with the stored messages from this sequence number on."""
        client, *frames = replay.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != 8:
            return
        for number, payload in tuple(self._sent_messages):
            if number >= frames[1]:
                replay.send_multipart((client, b"", number, payload))
        replay.send_multipart((client, b"", END_OF_REPLAY, b""))

    def _take_events(self) -> Iterator[Event]:
        """Yield the queued events. Consecutive removals become one event."""
        removed: list[int] = []
        while self._changes:
            try:
                change = self._changes.popleft()
            except IndexError:  # the queue was replaced meanwhile
                break
            if change.entry is not None and not change.stored:
                removed += self._page_hashes(change.entry, change.first, change.end)
                continue
            if removed:
                yield BlockRemoved(removed)
                removed = []
            yield AllBlocksCleared() if change.entry is None else self._stored_event(change)
        if removed:
            yield BlockRemoved(removed)

    def _stored_event(self, change: _Change) -> BlockStored:
        entry, size = change.entry, self._cache.page_size
        assert entry is not None
        salt = entry.origin.salt
        hashes = self._page_hashes(entry, change.first, change.end)
        return BlockStored(
            hashes,
            self._parent_hash(entry, change.first),
            entry.origin.ids[change.first * size : change.end * size].tolist(),
            size,
            extra_keys=None if salt is None else [(salt,)] * len(hashes),
        )

    def _parent_hash(self, entry: PrefixEntry, index: int) -> int | None:
        """Return the hash of the preceding page; None for the first page."""
        if index > entry.first:
            return self._page_hashes(entry, index - 1, index)[0]
        if entry.parent is None or not index:
            return None
        return self._page_hashes(entry.parent, index - 1, index)[0]

    def _page_hashes(self, entry: PrefixEntry, first: int, end: int) -> list[int]:
        """Return the hash of each page.

        It covers the parent's hash, the page's tokens and, with a draft, the token after the page.
        """
        hashes = self._hashes_by_entry.setdefault(entry, [])
        if entry.first + len(hashes) < end:
            size, num_following = self._cache.page_size, self._cache.lookahead_tokens
            parent = hashes[-1] if hashes else self._parent_hash(entry, entry.first)
            if parent is None:
                parent = _hash_of_salt(entry.origin.salt)
            ids = entry.origin.ids.astype("<i4", copy=False)
            for index in range(entry.first + len(hashes), end):
                tokens = ids[index * size : (index + 1) * size + num_following]
                parent = xxhash.xxh3_64_intdigest(tokens.tobytes(), parent)
                hashes.append(parent)
        return hashes[first - entry.first : end - entry.first]


def _hash_of_salt(salt: str | None) -> int:
    salt_bytes = b"" if salt is None else b"+" + salt.encode("utf-8", "surrogatepass")
    return xxhash.xxh3_64_intdigest(salt_bytes)


def _last_endpoint(bound_socket: zmq.Socket[bytes]) -> str:
    return bound_socket.getsockopt_string(zmq.LAST_ENDPOINT)
