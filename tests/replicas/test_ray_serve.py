"""Two replicas of the example on Ray: streams, a replica that is killed, an update under load."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from specbuild.runtime.serve.ray import build

pytestmark = pytest.mark.timeout(1200)
# Set before Ray is imported: it sends no usage data, and allows for a busy machine.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
}
# Long enough that a stream is still open when its replica is killed.
LONG = {"prompt": "def area(radius):", "max_tokens": 1500, "ignore_eos": True, "stream": True}


class Cluster:
    """A Ray cluster on this machine, with the application at ``url``."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def run(self, engine: Path) -> None:
        """Deploy an engine, or update to it; return when its replicas serve."""
        from ray import serve

        given = {"engine": str(engine), "replicas": "2", "num_cpus": "0.1", "name": "example"}
        serve.run(build(given), name="specbuild", route_prefix="/")

    def replicas(self) -> set[str]:
        """Return the live actors of the replicas."""
        from ray.util import list_named_actors

        named = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
        return {name for name in named if name.startswith("SERVE_REPLICA::specbuild#engine#")}

    def kill(self, replica: str) -> None:
        import ray

        ray.kill(ray.get_actor(replica, namespace="serve"))

    def running(self, session: str) -> int:
        """Return the number of running requests on the replica of a session."""
        load = httpx.get(f"{self.url}/load", headers={"x-session-id": session}, timeout=120)
        found: int = load.json()["running"]
        return found

    def body(self, **fields: Any) -> dict[str, Any]:
        return {"model": "example", "temperature": 0, **LONG, **fields}


class Stream(threading.Thread):
    """A client that reads a stream to its end, in a separate session."""

    def __init__(self, cluster: Cluster, session: str, **fields: Any) -> None:
        super().__init__(daemon=True)
        self.cluster, self.session, self.fields = cluster, session, fields
        self.began = threading.Event()
        self.text, self.done, self.failed = "", False, ""

    def run(self) -> None:
        try:
            with httpx.stream(
                "POST",
                f"{self.cluster.url}/v1/completions",
                json=self.cluster.body(**self.fields),
                headers={"x-session-id": self.session},
                timeout=300,
            ) as answer:
                if answer.status_code != 200:
                    self.failed = f"{answer.status_code} {answer.read()[:300]!r}"
                    return
                self._read(answer)
        except httpx.HTTPError as error:
            self.failed = repr(error)
        finally:
            self.began.set()

    def _read(self, answer: httpx.Response) -> None:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.failed = str(event["error"])
                    return
                self.text += event["choices"][0]["text"] if event["choices"] else ""
                self.began.set()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@pytest.fixture(scope="module")
def cluster(example_engine: Path) -> Iterator[Cluster]:
    os.environ.update(ENVIRONMENT)
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=128 * 2**20,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        found = Cluster(port)
        found.run(example_engine)
        yield found
        serve.shutdown()
    finally:
        ray.shutdown()


def two_streams(cluster: Cluster) -> tuple[Stream, Stream]:
    """Open streams of two sessions, each on a different replica."""
    first = Stream(cluster, "first")
    first.start()
    assert first.began.wait(120) and not first.failed, first.failed
    assert cluster.running("first") == 1
    other = next(s for s in map(str, range(40)) if cluster.running(s) == 0)
    second = Stream(cluster, other)
    second.start()
    assert second.began.wait(120) and not second.failed, second.failed
    assert (cluster.running("first"), cluster.running(other)) == (1, 1)
    return first, second


def test_a_killed_replica_ends_its_own_streams_only(cluster: Cluster) -> None:
    """One of two streaming replicas is killed: the other streams on, and it is replaced."""
    before = cluster.replicas()
    assert len(before) == 2
    streams = two_streams(cluster)
    cluster.kill(min(before))
    for stream in streams:
        stream.join(300)
    (lost,) = [stream for stream in streams if not stream.done]
    (kept,) = [stream for stream in streams if stream.done]
    assert lost.failed and not kept.failed
    assert kept.text.startswith(lost.text) and len(kept.text) > len(lost.text)
    end_s = time.monotonic() + 240
    while len(cluster.replicas() - {min(before)}) < 2:
        assert time.monotonic() < end_s, "the replica did not return"
        time.sleep(1)
    again = Stream(cluster, lost.session, max_tokens=8)
    again.start()
    again.join(240)
    assert again.done and kept.text.startswith(again.text)


def test_an_update_to_another_engine_loses_no_request(
    cluster: Cluster, example_engine: Path, tmp_path: Path
) -> None:
    """Clients send requests continuously; every answer is complete and equal."""
    other = Path(shutil.copytree(example_engine, tmp_path / "other"))
    before, over = cluster.replicas(), threading.Event()
    asked: list[Stream] = []

    def ask(client: int) -> None:
        while not over.is_set():
            stream = Stream(cluster, f"{client}-{len(asked)}", max_tokens=60)
            asked.append(stream)
            stream.run()

    clients = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for client in clients:
        client.start()
    try:
        cluster.run(other)
    finally:
        over.set()
        for client in clients:
            client.join(300)
    assert not cluster.replicas() & before
    assert [stream.failed for stream in asked if not stream.done] == []
    assert len(asked) > 3 and len({stream.text for stream in asked}) == 1
