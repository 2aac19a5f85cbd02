"""Events of the prefix cache for routers: a subscriber can rebuild the contents of the cache."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st
from toy_device import toy_cuda
from toy_engine import CACHING, CACHING_ALL, run, toy_engine
from toy_model import VOCAB
from toy_plan import SHAPES

from specbuild.runtime.engine import Engine
from specbuild.runtime.errors import RequestError
from specbuild.runtime.request import GenerateParams
from specbuild.runtime.serve.kv_events import EventEndpoints, KvEventPublisher

ANYWHERE = EventEndpoints("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@toy")
SIZE = 4


class Subscriber:
    """Reads messages as plain MessagePack, and stores the blocks that they announce.

    ``blocks`` maps a hash to its parent's, its tokens and its salt.
    """

    def __init__(self, events: KvEventPublisher) -> None:
        self.context = zmq.Context()
        self.replay = self.context.socket(zmq.DEALER)
        self.replay.connect(events.replay_endpoint)
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}
        self.next = 0

    def close(self) -> None:
        self.context.destroy(linger=0)

    def catch_up(self) -> int:
        """Request the missed messages from the next number; return how many arrived."""
        self.replay.send_multipart([b"", self.next.to_bytes(8, "big")])
        came = 0
        while True:
            assert self.replay.poll(5000), "no answer"
            empty, number, payload = self.replay.recv_multipart()
            assert not empty
            if number == b"\xff" * 8:
                assert not payload
                return came
            self.take(number, payload)
            came += 1

    def take(self, number: bytes, payload: bytes) -> None:
        assert int.from_bytes(number, "big") == self.next
        self.next += 1
        ts, events, rank = msgspec.msgpack.decode(payload)
        assert ts > 1.6e9 and rank is None
        for event in events:
            self.apply(event)

    def apply(self, event: dict[str, Any]) -> None:
        kind = event.pop("type")
        if kind == "AllBlocksCleared":
            assert not event
            self.blocks.clear()
            return
        hashes = event.pop("block_hashes")
        assert hashes
        if kind == "BlockRemoved":
            assert not event
            for each in hashes:
                del self.blocks[each]
            return
        assert kind == "BlockStored" and event["block_size"] == SIZE
        before, tokens = event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == SIZE * len(hashes)
        salts = event.get("extra_keys", [None] * len(hashes))
        for i, (each, salt) in enumerate(zip(hashes, salts, strict=True)):
            assert each not in self.blocks, "it was there"
            ids = tuple(tokens[i * SIZE : (i + 1) * SIZE])
            self.blocks[each] = (before, ids, tuple(salt) if salt else None)
            before = each


def has(engine: Engine) -> list[tuple[tuple[int, ...], Any]]:
    """Return the tokens of every block in the cache, from the cache's own entries."""
    assert engine.prefixes is not None
    return sorted(
        (
            (tuple(span.entry.origin.ids[page * SIZE : (page + 1) * SIZE].tolist()), page),
            str(span.entry.origin.salt),
        )
        for span in engine.prefixes.blocks()
        for page in range(span.first, span.end)
    )


def check_rebuilt(subscriber: Subscriber, engine: Engine) -> None:
    """Assert that the subscriber has the cache's blocks, each with its prefix.

    A page may be evicted before a page that follows it; the prefix of that page is then unknown.
    """

    def depth(block: int | None) -> int | None:
        """Return the number of blocks up to this one, or None if one of them was evicted."""
        if block is None:
            return 0
        if block not in subscriber.blocks:
            return None
        before = depth(subscriber.blocks[block][0])
        return None if before is None else 1 + before

    there = has(engine)
    listed, placed = [], []
    for before, ids, salt in subscriber.blocks.values():
        named, place = str(salt[0] if salt else None), depth(before)
        listed.append((ids, named))
        if place is not None:
            placed.append(((ids, place), named))
    assert sorted(listed) == sorted((ids, salt) for (ids, _), salt in there)
    assert not Counter(placed) - Counter(there)


prompts = st.builds(
    lambda which, shared, rest: [*([which] * shared), *rest],
    st.sampled_from([0, 1]),
    st.integers(0, 24),
    st.lists(st.integers(0, VOCAB - 2), min_size=1, max_size=6),
)


@pytest.mark.parametrize("kind", ["host", "device"])
@settings(max_examples=5, deadline=None)
@example(
    prompts_and_salts=[
        ([0], None),
        ([0] * 13, None),
        ([0] * 24, "a"),
        ([1] * 18 + [0] * 6, None),
        ([0] * 12, None),
    ],
    pages=20,
    generated=True,
    waiting=1,
)
@given(
    st.lists(st.tuples(prompts, st.sampled_from([None, "a"])), min_size=1, max_size=10),
    st.sampled_from([20, 60]),
    st.booleans(),
    st.sampled_from([1, 4, 1000]),
)
def test_a_subscriber_rebuilds_the_cache(
    kind: str,
    prompts_and_salts: list[tuple[list[int], str | None]],
    pages: int,
    generated: bool,
    waiting: int,
) -> None:
    """Compare whenever the engine is idle, also after a queue overflow and with few pages."""
    settings = CACHING_ALL if generated else CACHING
    if kind == "host":
        engine = toy_engine(settings, kv_pages=pages)
    else:
        engine = toy_cuda(settings, kv_pages=pages).engine
    assert engine.prefixes is not None
    with KvEventPublisher(engine.prefixes, ANYWHERE, max_queued=waiting) as events:
        subscriber = Subscriber(events)
        try:
            for ids, salt in prompts_and_salts:
                params = GenerateParams(max_new_tokens=6, cache_salt=salt)
                run(engine, [ids], params, speculation=SHAPES[1])
                while events.num_queued:
                    pass
                subscriber.catch_up()
                check_rebuilt(subscriber, engine)
        finally:
            subscriber.close()


def test_messages_have_a_topic_and_increasing_numbers() -> None:
    engine = toy_engine(CACHING)
    assert engine.prefixes is not None
    with KvEventPublisher(engine.prefixes, ANYWHERE) as events, zmq.Context() as context:
        live = context.socket(zmq.SUB)
        live.linger = 0
        live.connect(events.endpoint)
        live.subscribe("kv@toy")
        run(engine, [range(9)], GenerateParams(max_new_tokens=1))
        (span,) = engine.prefixes.blocks()
        messages: list[list[bytes]] = []
        while len(messages) < 2:  # the first messages are sent before it is connected
            events.stored(*span)
            if live.poll(50):
                messages.append(live.recv_multipart())
        first, second = messages
        live.close()
    assert first[0] == second[0] == b"kv@toy"
    assert int.from_bytes(second[1], "big") == int.from_bytes(first[1], "big") + 1
    assert msgspec.msgpack.decode(second[2])[1][0]["type"] == "BlockStored"


def test_rejects_an_endpoint_that_cannot_be_bound() -> None:
    engine = toy_engine(CACHING)
    assert engine.prefixes is not None
    for endpoint in ("nonsense", "ipc:///no/such/folder/socket"):
        with pytest.raises(RequestError, match="cannot publish events"):
            KvEventPublisher(engine.prefixes, EventEndpoints(endpoint))
    assert engine.prefixes.listener is None
