"""Two versions of specbuild: the sources of their files, and their launches."""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parent
PACKAGES = ("builder", "plugins_cuda", "runtime", "cli")


def checkout(version: str, folder: Path) -> Path:
    """Return the folder of a version: itself, or the files of a revision written to ``folder``.

    Raises ValueError if it is neither.
    """
    if (Path(version) / "plugins_cuda").is_dir():
        return Path(version).resolve()
    command = ["git", "archive", version, *PACKAGES]
    archive = subprocess.run(command, cwd=BENCHMARKS.parent, capture_output=True, check=False)
    if archive.returncode != 0:
        raise ValueError(f"{version} is neither a checkout nor a revision: {archive.stderr!r}")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def packages(tree: Path, folder: Path) -> Path:
    """Return a folder for PYTHONPATH in which specbuild is that of ``tree``."""
    inside = folder / "specbuild"
    inside.mkdir(parents=True)
    for package in PACKAGES:
        (inside / package).symlink_to(tree / package)
    for file in (tree / "cli" / "specbuild").glob("*.py"):
        (inside / file.name).symlink_to(file)
    return folder


class Listing:
    """Runs ``kernel_listing.py`` with a version's specbuild: its launches and its cubins.

    Methods raise ValueError if the process has ended; its message is on standard error.
    """

    def __init__(
        self, version: str, requests: Path, args: argparse.Namespace, folder: Path
    ) -> None:
        path = packages(checkout(version, folder / "files"), folder / "packages")
        self._output = folder / "listing.json"
        command = [sys.executable, str(BENCHMARKS / "kernel_listing.py"), str(requests)]
        command += [str(self._output), "--store", str(args.store)]
        command += ["--jobs", str(max(1, args.jobs // 2))]
        command += ["--afresh"] if args.afresh else []
        result = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        self._process = subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": result},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def launches(self) -> list[Any]:
        """Return the launches of every request."""
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise ValueError("what is above ended a listing")
        return list(json.loads(self._output.read_text()))

    def compiled(
        self, sources: Sequence[str], seconds: float | None
    ) -> Iterator[tuple[str, dict[str, str]]]:
        """Yield each source after compilation, in about this order, with its cubin or problem.

        No more are started after the time limit.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._process.stdin as to_process:
            print(json.dumps([sources, seconds]), file=to_process)
        for line in self._process.stdout:
            source, code = json.loads(line)
            yield source, code
        if self._process.wait() != 0:
            raise ValueError("what is above ended a listing")
