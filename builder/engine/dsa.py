"""DSA as a build is asked for it: defaults, and everything that must hold of the numbers."""

from __future__ import annotations

from specbuild.builder.options import BuildOptions
from specbuild.runtime.engine_dir.manifest import DraftShape, Dsa, TargetGeometry
from specbuild.runtime.errors import SpecbuildError

DEFAULTS = Dsa(
    top_k=2048,
    threshold=8192,
    first_tokens=4,
    recent_tokens=64,
    min_agreement=0.75,
    check_interval=64,
    key_dtype="bf16",
)
_PREFIX = "dsa_"
_LEAST = {"top_k": 1, "recent_tokens": 1}
_NAMES = tuple(DEFAULTS.__dataclass_fields__)
_NUMBERS = tuple(name for name in _NAMES if name != "key_dtype")


def dsa_of(
    options: BuildOptions, target: TargetGeometry, shape: DraftShape, *, max_seq_len: int
) -> Dsa | None:
    """What options and config ask for; None where the target's indexers are not used.

    SpecbuildError names an option that is out of range, with the numbers.
    """
    given = {name: getattr(options, _PREFIX + name) for name in _NAMES}
    given = {name: value for name, value in given.items() if value is not None}
    indexer = target.indexer
    if indexer is None:
        if given:
            raise SpecbuildError(f"{_option(next(iter(given)))} needs --dsa; add it")
        return None
    named = {"top_k": indexer.top_k, "threshold": indexer.threshold}
    named = {name: value for name, value in named.items() if value is not None}
    chosen = {name: getattr(DEFAULTS, name) for name in _NAMES}
    config = Dsa(**{**chosen, **named, **given})
    for name in _NUMBERS:
        least = _LEAST.get(name, 0)
        if getattr(config, name) < least:
            raise SpecbuildError(
                f"{_option(name)} is {getattr(config, name)}; it must be at least {least}"
            )
    if config.min_agreement > 1:
        raise SpecbuildError(
            f"--dsa-min-agreement is {config.min_agreement:g}, a share of tokens from 0 to 1"
        )
    if config.recent_tokens <= shape.draft_depth:
        raise SpecbuildError(
            f"--dsa-recent-tokens {config.recent_tokens} does not cover a draft of depth "
            f"{shape.draft_depth} and its root, so that drafts would change the output; raise it "
            f"to {shape.draft_depth + 1} or lower --draft-depth"
        )
    if options.dsa and config.threshold >= max_seq_len:
        raise SpecbuildError(
            f"--dsa-threshold {config.threshold} is never passed: the engine's longest sequence "
            f"has {max_seq_len} tokens; raise --max-seq-len or lower it"
        )
    return config


def dsa_warnings(config: Dsa | None, *, max_seq_len: int) -> tuple[str, ...]:
    """What a config that enables the indexer leaves without effect."""
    if config is None or config.threshold < max_seq_len:
        return ()
    return (
        f"DSA begins at {config.threshold} tokens, the engine's longest sequence has "
        f"{max_seq_len}: all of its tokens are attended to (--dsa-threshold)",
    )


def _option(name: str) -> str:
    return f"--{(_PREFIX + name).replace('_', '-')}"
