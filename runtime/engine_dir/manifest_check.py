"""Checks of a manifest that its types cannot express."""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import PurePosixPath

from specbuild.runtime.engine_dir.backends import facts_of
from specbuild.runtime.engine_dir.claims_check import check_claims
from specbuild.runtime.engine_dir.drafters.record import HostRecord, ModelRecord
from specbuild.runtime.engine_dir.features import require_listed
from specbuild.runtime.engine_dir.geometry_check import check_target
from specbuild.runtime.engine_dir.manifest import (
    ROLES,
    CacheGroup,
    Limits,
    Manifest,
    Role,
    StoredFile,
)
from specbuild.runtime.engine_dir.plan import PLAN_FILE
from specbuild.runtime.engine_dir.ranks import check_ranks
from specbuild.runtime.errors import EngineFileError

_DIGEST = re.compile(r"[0-9a-f]{32}")
_LARGEST = 2**31 - 1
DECODING_ROLES = ("target", "choose")
# Graph inputs that describe a tree, for any drafter.
TREE_ROLES = ("accept", "commit")
POOL_AXES = ("kv_heads", "page_size", "pages", "width")


def check_manifest(manifest: Manifest) -> None:
    """Raise EngineFileError for the first inconsistency."""
    _check_limits(manifest.limits, drafted=bool(manifest.drafters))
    check_target(manifest.target)
    for name, entry in manifest.files.items():
        _check_file(name, entry)
    _check_groups(manifest)
    _check_drafters(manifest)
    _check_roles(manifest)
    check_claims(manifest)
    require_listed(manifest, manifest.features)


def _check_limits(limits: Limits, *, drafted: bool) -> None:
    names = ["max_seq_len", "max_batch_size", "max_rows"]
    names += ["draft_top_k", "draft_depth", "draft_tokens"] if drafted else []
    for name in names:
        value = getattr(limits, name)
        if not 1 <= value <= _LARGEST:
            raise EngineFileError(f"limits.{name} is {value}, must be 1 or above")


def _check_file(name: str, entry: StoredFile) -> None:
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or "\\" in name:
        raise EngineFileError(f"file {name!r} does not lie inside the engine")
    if str(path) != name or not name.isprintable():
        raise EngineFileError(f"file {name!r} has a name that no engine's file has")
    chunks = 0
    if entry.chunk_bytes is not None:
        if entry.chunk_bytes < 1:
            raise EngineFileError(f"file {name}: chunk_bytes is {entry.chunk_bytes}")
        chunks = max(1, -(-entry.bytes // entry.chunk_bytes))
    if entry.bytes < 0 or chunks != len(entry.chunks):
        raise EngineFileError(
            f"file {name}: {entry.bytes} bytes are {chunks} chunks, {len(entry.chunks)} are listed"
        )
    if not all(_DIGEST.fullmatch(digest) for digest in (entry.xxh3_128, *entry.chunks)):
        raise EngineFileError(f"file {name}: a checksum is no XXH3-128")


def _check_groups(manifest: Manifest) -> None:
    names = [group.name for group in manifest.sequence_groups]
    if len(set(names)) != len(names):
        raise EngineFileError(f"cache groups {names} share a name")
    for group in manifest.cache_groups:
        _check_group(group)


def _check_group(group: CacheGroup) -> None:
    for field in ("kv_heads", "k_width", "v_width", "page_size"):
        if not 1 <= getattr(group, field) <= _LARGEST:
            raise EngineFileError(f"cache group {group.name}: {field} is {getattr(group, field)}")
    if not 2 <= group.pages <= _LARGEST // group.page_size:
        raise EngineFileError(f"cache group {group.name}: pages is {group.pages}")
    if not 0 <= group.window <= _LARGEST:
        raise EngineFileError(f"cache group {group.name}: window is {group.window}")
    if tuple(sorted(group.pool_axes)) != POOL_AXES:
        raise EngineFileError(f"cache group {group.name}: pool_axes are {group.pool_axes}")
    if len(set(group.layers)) < len(group.layers):
        raise EngineFileError(f"cache group {group.name}: layers are {group.layers}")
    if group.latent_widths:
        _check_latents(group)


def _check_latents(group: CacheGroup) -> None:
    widths = group.latent_widths
    if len(widths) != len(group.layers) or not all(1 <= w <= group.k_width for w in widths):
        raise EngineFileError(
            f"cache group {group.name}: latent_widths are {widths}, expected {len(group.layers)} "
            f"from 1 to {group.k_width}"
        )
    if group.kv_heads != 1:
        raise EngineFileError(f"cache group {group.name}: {group.kv_heads} heads share a latent")


def _check_drafters(manifest: Manifest) -> None:
    groups = {group.name for group in manifest.cache_groups}
    owner: dict[str, int] = {}
    for place, drafter in enumerate(manifest.drafters):
        if isinstance(drafter, HostRecord):
            _check_host_drafter(place, drafter, manifest.limits)
        if not isinstance(drafter, ModelRecord):
            continue
        if drafter.cache_group not in groups:
            raise EngineFileError(
                f"drafters[{place}]: cache group {drafter.cache_group!r} is not listed"
            )
        has_plan = facts_of(manifest.backend).has_plan
        required = () if has_plan else tuple(map(drafter.role, drafter.ROLES))
        if drafter.roles != required:
            raise EngineFileError(f"drafters[{place}]: roles are {drafter.roles}, not {required}")
        for role in drafter.roles:
            if role not in manifest.roles:
                raise EngineFileError(f"drafters[{place}]: role {role!r} is not listed")
            if owner.setdefault(role, place) != place:
                raise EngineFileError(f"drafters {owner[role]} and {place} share role {role!r}")
        outside = [
            layer
            for layer in drafter.geometry.aux_layers
            if not 0 <= layer < manifest.target.layers
        ]
        if outside:
            raise EngineFileError(
                f"drafters[{place}]: aux_layers {outside} are none of the target's "
                f"{manifest.target.layers} layers"
            )
    kinds = [drafter.kind for drafter in manifest.drafters]
    if len(set(kinds)) < len(kinds):
        raise EngineFileError(f"drafters: two of {kinds} are of one kind")
    of_models = [model.cache_group for model in manifest.models]
    if len(set(of_models)) < len(of_models):
        raise EngineFileError(f"drafters: two of {kinds} have one cache group")


def _check_host_drafter(place: int, drafter: HostRecord, limits: Limits) -> None:
    problem = drafter.problem()
    longest = min(limits.draft_depth, limits.draft_tokens)
    if problem is None and not 1 <= drafter.max_tokens <= longest:
        problem = f"max_tokens is {drafter.max_tokens}, the limits allow 1 to {longest}"
    if problem is not None:
        raise EngineFileError(f"drafters[{place}]: {problem}")


def _check_roles(manifest: Manifest) -> None:
    check_ranks(manifest)
    backend = facts_of(manifest.backend)
    if backend.has_plan:
        if PLAN_FILE not in manifest.files:
            raise EngineFileError(f"{PLAN_FILE} is not listed")
        if manifest.roles:
            raise EngineFileError(
                f"a {backend.name} engine has no graphs, {sorted(manifest.roles)} listed"
            )
        return
    if backend.has_engines != (manifest.tensorrt is not None):
        raise EngineFileError(
            f"backend is {manifest.backend}, but tensorrt is {manifest.tensorrt}: one is wrong"
        )
    required = DECODING_ROLES + (TREE_ROLES if manifest.drafters else ())
    missing = [role for role in required if role not in manifest.roles]
    of_drafters = {role for drafter in manifest.drafters for role in drafter.roles}
    unknown = sorted(set(manifest.roles) - {*ROLES, *of_drafters})
    if missing or unknown:
        raise EngineFileError(f"roles: missing {missing}, unknown {unknown}")
    groups = {group.name for group in manifest.sequence_groups}
    for name, role in manifest.roles.items():
        if role.file not in manifest.files:
            raise EngineFileError(f"role {name}: its file {role.file!r} is not listed")
        _check_profiles(name, role)
        absent = sorted(set(role.tensors) - set(manifest.tensors))
        if absent:
            raise EngineFileError(f"role {name}: tensors {absent[:3]} are not listed")
        _check_role_ports(name, role, groups)


def _check_role_ports(name: str, role: Role, groups: Collection[str]) -> None:
    for port in (*role.inputs, *role.outputs):
        if not all(isinstance(n, str) or 0 <= _fixed_size(n) <= _LARGEST for n in port.shape):
            raise EngineFileError(f"role {name}: {port.name} has shape {list(port.shape)}")
    for port in role.inputs:
        group = port.name.partition(".")[0]
        if "." in port.name and group not in groups:
            raise EngineFileError(f"role {name}: input {port.name} names no cache group")


def _fixed_size(size: object) -> int:
    """Return a size of a shape, or −1 if it is dynamic."""
    return size if isinstance(size, int) and not isinstance(size, bool) else -1


def _check_profiles(name: str, role: Role) -> None:
    for profile in role.profiles:
        for axis, sizes in profile.axes.items():
            if not 0 <= sizes.least <= sizes.usual <= sizes.most <= _LARGEST:
                raise EngineFileError(
                    f"role {name}: profile {profile.name} gives axis {axis} the sizes "
                    f"{sizes.least}, {sizes.usual} and {sizes.most}, which do not rise"
                )
