"""The store of tests: atomic entries, repair of damage, eviction of unused entries."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
from content_store import ContentStore, digest

TESTS = Path(__file__).parents[1]


class Maker:
    """Writes an entry of some bytes, and counts its calls."""

    def __init__(self, data: bytes = b"data") -> None:
        self.data, self.count = data, 0

    def __call__(self, folder: Path) -> None:
        self.count += 1
        (folder / "file").write_bytes(self.data)


def test_an_entry_is_created_once_and_persists(tmp_path: Path) -> None:
    make = Maker()
    for _ in range(2):
        store = ContentStore(tmp_path)
        for _ in range(2):
            assert (store.made("kind", "key", make) / "file").read_bytes() == b"data"
    assert make.count == 1
    store.made("kind", "other", make)
    store.made("other", "key", make)
    assert make.count == 3
    assert sorted(store.keys("kind")) == ["key", "other"]


@pytest.mark.parametrize("damage", ["changed", "cut", "missing", "no digests", "bad digests"])
def test_a_damaged_entry_is_recreated(tmp_path: Path, damage: str) -> None:
    make = Maker()
    entry = ContentStore(tmp_path).made("kind", "key", make)
    if damage == "changed":
        (entry / "file").write_bytes(b"dat4")
    elif damage == "cut":
        (entry / "file").write_bytes(b"")
    elif damage == "missing":
        (entry / "file").unlink()
    elif damage == "no digests":
        (entry / "digests.json").unlink()
    else:
        (entry / "digests.json").write_text("[]" * 2)
    store = ContentStore(tmp_path)
    assert store.find("kind", "key") is None
    assert (store.made("kind", "key", make) / "file").read_bytes() == b"data"
    assert make.count == 2


def test_an_interrupted_maker_leaves_no_entry(tmp_path: Path) -> None:
    code = f"""
import os
from pathlib import Path
from content_store import ContentStore
def make(folder):
    (folder / "file").write_bytes(b"half")
    os.kill(os.getpid(), 9)
ContentStore(Path({str(tmp_path)!r})).made("kind", "key", make)
"""
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    killed = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert killed.returncode == -9
    store, make = ContentStore(tmp_path), Maker()
    assert store.find("kind", "key") is None
    assert (store.made("kind", "key", make) / "file").read_bytes() == b"data"
    assert any((tmp_path / "unfinished").iterdir())
    store.evict()
    assert not any((tmp_path / "unfinished").iterdir())


def test_a_maker_that_raises_leaves_no_entry(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "file").write_bytes(b"half")
        raise OSError

    store = ContentStore(tmp_path)
    with pytest.raises(OSError):
        store.made("kind", "key", fail)
    assert store.find("kind", "key") is None


def _make_and_log(folder: Path, log: Path) -> None:
    def make(entry: Path) -> None:
        with log.open("a") as file:
            file.write(entry.name.split("-")[1] + "\n")
        (entry / "file").write_bytes(entry.name.split("-")[1].encode())

    store = ContentStore(folder)
    for key in range(40):
        assert (store.made("kind", str(key), make) / "file").read_bytes() == str(key).encode()


def test_two_processes_create_each_entry_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_make_and_log, args=(tmp_path / "store", log)) for _ in range(2)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert sorted(log.read_text().split(), key=int) == [str(key) for key in range(40)]


def test_the_least_recently_used_entries_are_evicted(tmp_path: Path) -> None:
    store = ContentStore(tmp_path)
    for place, key in enumerate("abcd"):
        entry = store.made("kind", key, Maker(bytes(1 << 20)))
        os.utime(entry / "digests.json", (place, place))
    store.close()
    store = ContentStore(tmp_path)
    assert store.find("kind", "a") is not None, "it is used now"
    assert store.evict(5 << 20) == 0
    assert store.evict(5 << 19) == 2
    assert sorted(store.keys("kind")) == ["a", "d"]
    assert store.find("kind", "b") is None


def test_nothing_is_evicted_while_another_process_uses_the_store(tmp_path: Path) -> None:
    mine, other = ContentStore(tmp_path), ContentStore(tmp_path)
    mine.made("kind", "key", Maker())
    assert mine.evict(0) == 0 and mine.find("kind", "key") is not None
    other.close()
    assert mine.evict(0) == 1 and mine.find("kind", "key") is None


def test_parts_of_a_key_are_delimited() -> None:
    assert len({digest("ab", "c"), digest("a", "bc"), digest("abc"), digest("abc", "")}) == 4
