"""The draft that ``run`` and ``bench`` request, from their options and the engine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from specbuild.builder.options import TreeOptions
from specbuild.runtime.engine_dir.manifest import DraftShape, Limits, Manifest
from specbuild.runtime.errors import SpecbuildError

if TYPE_CHECKING:
    from specbuild.runtime.decode.decoder import DraftSetting
    from specbuild.runtime.draft.static_tree import StaticTree


def describe_shape(shape: DraftShape) -> str:
    """Return the sizes of a shape with their names, as tables print them."""
    return f"top-k {shape.draft_top_k}, depth {shape.draft_depth}, {shape.draft_tokens} tokens"


def draft_setting_of(
    manifest: Manifest,
    options: TreeOptions,
    *,
    no_spec: bool,
    drafter: str | None = None,
    tree_file: Path | None = None,
) -> DraftSetting:
    """Return the draft settings of a run. ``no_spec`` means ``drafter`` none and overrides a file.

    ``tree_file`` has a static tree, which replaces the tree's options.

    Raises SpecbuildError if the options contradict each other or exceed the engine.
    """
    from specbuild.runtime.decode.decoder import DraftSetting
    from specbuild.runtime.draft.registry import AUTO, NONE, drafter_named

    requested = NONE if no_spec else drafter or AUTO
    if tree_file is not None and options.given():
        flag = options.flag(next(iter(options.given())))
        raise SpecbuildError(f"--draft-tree defines the complete tree: omit {flag}")
    if requested == NONE and (options.given() or tree_file is not None):
        flag_text = "--no-spec" if no_spec else "--drafter none"
        raise SpecbuildError(f"{flag_text} contradicts the --draft options: give one or the other")
    if not manifest.drafters and (options.given() or tree_file is not None):
        raise SpecbuildError("the engine has no draft: leave the --draft options out")
    record = None if requested == NONE else drafter_named(manifest, requested)
    if record is None:
        return DraftSetting(None)
    if tree_file is not None:
        return DraftSetting(read_tree(tree_file), requested)
    if not options.given():
        return DraftSetting(drafter=requested)
    return DraftSetting(_shape(manifest.limits, manifest.draft_default, options), requested)


def read_tree(file: Path) -> StaticTree:
    """Return a static tree from a list of parents, alone or under ``parents``.

    Raises SpecbuildError with the file's name if it has none.
    """
    from specbuild.runtime.draft.static_tree import StaticTree
    from specbuild.runtime.engine_dir.strict_json import parsed

    try:
        data = parsed(file.read_bytes())
    except OSError as error:
        raise SpecbuildError(f"--draft-tree {file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SpecbuildError(f"--draft-tree {file} is no JSON: {error}") from error
    parents = data.get("parents") if isinstance(data, dict) and len(data) == 1 else data
    if not isinstance(parents, list) or not all(type(p) is int for p in parents):
        raise SpecbuildError(
            f"--draft-tree {file}: give a list of parents, as [-1, -1, 0, 0, 1], or "
            '{"parents": [...]}'
        )
    try:
        return StaticTree.of(parents)
    except SpecbuildError as error:
        raise SpecbuildError(f"--draft-tree {file}: {error}") from error


def _shape(limits: Limits, default: DraftShape | None, options: TreeOptions) -> DraftShape:
    for name, requested in options.given().items():
        limit = getattr(limits, f"draft_{name}")
        if requested > limit:
            raise SpecbuildError(
                f"{options.flag(name)} {requested} is more than the engine was built for "
                f"({limit}): reduce it, or rebuild the engine with a larger limit"
            )
    if default is None:
        default = DraftShape(limits.draft_top_k, limits.draft_depth, limits.draft_tokens)
    top_k = default.draft_top_k if options.top_k is None else options.top_k
    depth = default.draft_depth if options.depth is None else options.depth
    pool = DraftShape(top_k, depth, 0).candidates
    if options.tokens is not None and options.tokens > pool:
        raise SpecbuildError(
            f"--draft-tokens {options.tokens} is more than the {pool} nodes that "
            f"top-k {top_k} and depth {depth} draft: ask for fewer, or a wider or deeper tree"
        )
    tokens = min(pool, limits.draft_tokens) if options.tokens is None else options.tokens
    return DraftShape(top_k, depth, tokens)
