"""Downloads a model from Hugging Face: safetensors, GGUF, JSON and chat templates only."""

from __future__ import annotations

import glob
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.builder.durable import free_space
from specbuild.cli.model.reference import GGUF_SUFFIX, HubReference, first_parts
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.builder.progress import Progress

# No file that runs code when it is loaded: no pickle, no Python.
_WEIGHTS = "*.safetensors"
_TEXTS = ("*.json", "*.jinja")
# Other forms of the same weights: in subfolders, and in Mistral's own format.
_IGNORED = ["*/*", "consolidated*"]
_DEFAULT_VARIANT = "Q4_K_M"
_POLL_S = 0.5
# Free space to keep for the engine's small files and for others.
_SPARE_BYTES = 64 << 20


def download(reference: HubReference, revision: str | None, progress: Progress) -> Path:
    """Return the checkpoint directory or the GGUF file, downloaded if it is not cached.

    The files are in the cache of ``huggingface_hub``, whose environment variables apply. Without a
    network, or with ``HF_HUB_OFFLINE``, the cached files are used. Raises SpecbuildError with the
    download command if that is not possible here.
    """
    from huggingface_hub.errors import DryRunError

    try:
        with _sentences(reference, revision):
            try:
                return _fetched(reference, revision, progress)
            except DryRunError as error:
                return _cached(reference, revision, error)
    except OSError as error:
        raise SpecbuildError(f"{reference.id}: the download failed ({error})") from error


def _fetched(reference: HubReference, revision: str | None, progress: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    listed = snapshot_download(
        reference.id,
        revision=revision,
        allow_patterns=[_WEIGHTS, f"*{GGUF_SUFFIX}", *_TEXTS],
        ignore_patterns=_IGNORED,
        dry_run=True,
    )
    names = chosen_files(reference, [info.filename for info in listed])
    missing = [info for info in listed if info.filename in names and info.will_download]
    if not missing:
        return _place(Path(listed[0].local_path).parent, names)
    blobs = Path(missing[0].local_path).parents[2] / "blobs"
    size = sum(info.file_size or 0 for info in missing)
    _require_space(reference, blobs, size)
    progress.start(f"downloading {reference.title}", size, "B")
    with _growth(blobs, size, progress):
        folder = snapshot_download(
            reference.id, revision=missing[0].commit_hash, allow_patterns=_exactly(names)
        )
    return _place(Path(folder), names)


def _cached(reference: HubReference, revision: str | None, cause: Exception) -> Path:
    """Return the cached model; SpecbuildError if it is incomplete."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def local(names: Sequence[str]) -> Path:
        return Path(
            snapshot_download(
                reference.id,
                revision=revision,
                local_files_only=True,
                allow_patterns=_exactly(names),
            )
        )

    try:
        cached_names = [entry.name for entry in local(["none of them"]).iterdir()]
        names = chosen_files(reference, cached_names)
        return _place(local(names), names)
    except LocalEntryNotFoundError:
        if isinstance(cause.__cause__, HfHubHTTPError):
            raise cause.__cause__ from None
        raise SpecbuildError(_not_here(reference, revision, cause)) from cause


def chosen_files(reference: HubReference, names: Sequence[str]) -> list[str]:
    """Return the files of a repository that a build needs: safetensors, else one GGUF model.

    Raises SpecbuildError if there are none, or several GGUF models and no ``variant``.
    """
    texts = [name for name in names if name.endswith((".json", ".jinja"))]
    weights = [name for name in names if name.endswith(".safetensors")]
    models = first_parts(sorted(name for name in names if name.endswith(GGUF_SUFFIX)))
    if reference.variant is None and weights:
        return [*weights, *texts]
    if not models:
        kind = "safetensors or GGUF" if reference.variant is None else "GGUF"
        raise SpecbuildError(
            f"{reference.id} holds no {kind} files, the only weights that specbuild downloads"
        )
    variant = (reference.variant or _DEFAULT_VARIANT).lower()
    candidates = [name for name in models if variant in name.lower()]
    if reference.variant is None and len(models) == 1:
        candidates = models
    if len(candidates) != 1:
        raise SpecbuildError(
            f"{reference.id} holds {len(models)} GGUF models ({', '.join(models[:6])}"
            f"{', …' if len(models) > 6 else ''}): give one as {reference.id}:VARIANT, such as "
            f"{reference.id}:Q8_0"
        )
    stem = candidates[0].partition("-00001-of-")[0]
    parts = [name for name in names if name.startswith(f"{stem}-0") and name.endswith(GGUF_SUFFIX)]
    return sorted(parts) if stem != candidates[0] else candidates


def _place(folder: Path, names: Sequence[str]) -> Path:
    """Return the checkpoint: the folder of safetensors, or the first file of a GGUF model."""
    return folder / names[0] if names[0].endswith(GGUF_SUFFIX) else folder


def _exactly(names: Sequence[str]) -> list[str]:
    return [glob.escape(name) for name in names]


def _require_space(reference: HubReference, folder: Path, size: int) -> None:
    folder, free = free_space(folder)
    if free < size + _SPARE_BYTES:
        raise SpecbuildError(
            f"{reference.id}: the download takes {size / 1e9:.2f} GB, {folder} has "
            f"{free / 1e9:.2f} GB free; free some space, or set HF_HOME to a folder on another disk"
        )


@contextmanager
def _growth(folder: Path, total: int, progress: Progress) -> Iterator[None]:
    """Report the growth of the folder, the only progress that every transfer method has."""
    before, done = _folder_bytes(folder), threading.Event()

    def watch() -> None:
        reported = 0
        while not done.wait(_POLL_S):
            grown = min(total, _folder_bytes(folder) - before)
            progress.advance(max(0, grown - reported))
            reported = max(reported, grown)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _folder_bytes(folder: Path) -> int:
    total = 0
    for entry in folder.glob("*"):
        try:
            total += entry.stat().st_size
        except FileNotFoundError:  # A finished file was renamed.
            continue
    return total


@contextmanager
def _sentences(reference: HubReference, revision: str | None) -> Iterator[None]:
    """Convert errors of ``huggingface_hub`` to one sentence each."""
    from huggingface_hub import errors

    fetch = _command(reference, revision)
    page = f"https://huggingface.co/{reference.id}"
    try:
        yield
    except errors.GatedRepoError as error:
        raise SpecbuildError(
            f"{reference.id} is gated: accept its terms at {page}, log in with 'hf auth login', "
            f"then run it again or download it with '{fetch}'"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise SpecbuildError(
            f"{reference.id} is neither a path here nor a model that Hugging Face shows to you: "
            f"check the name, or for a private model log in with 'hf auth login', then '{fetch}'"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise SpecbuildError(f"{reference.id} has no revision {revision}: see {page}") from error
    except errors.HfHubHTTPError as error:
        raise SpecbuildError(f"{reference.id}: Hugging Face answered {_first_line(error)}") from (
            error
        )


def _not_here(reference: HubReference, revision: str | None, cause: Exception) -> str:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    reason: Any = "HF_HUB_OFFLINE is set"
    if not HF_HUB_OFFLINE:
        reason = f"Hugging Face cannot be reached ({_first_line(cause.__cause__ or cause)})"
    return (
        f"{reference.title} is neither a path here nor in the cache of downloads, and {reason}: "
        f"run '{_command(reference, revision)}' where there is a network"
    )


def _command(reference: HubReference, revision: str | None) -> str:
    """Return the command of ``huggingface_hub`` that downloads the model."""
    words = ["hf", "download", reference.id]
    if reference.variant is not None:
        words += ["--include", f'"*{reference.variant}*.gguf"']
    return " ".join(words if revision is None else [*words, "--revision", revision])


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
