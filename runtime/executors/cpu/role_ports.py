"""The inputs and outputs of every role as the host feeds and reads them.

As docs/developers/contracts.md#graphs names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeAlias

from specbuild.runtime.engine_dir.cache_groups import choosing_group
from specbuild.runtime.engine_dir.claims_check import pool_shapes
from specbuild.runtime.engine_dir.drafters import ModelDrafter
from specbuild.runtime.engine_dir.geometry import DFlashGeometry, DraftGeometry, PEagleGeometry
from specbuild.runtime.engine_dir.manifest import INDEXER_GROUP, CacheGroup, Manifest, Port
from specbuild.runtime.errors import EngineFileError
from specbuild.runtime.sampling import CHOOSE_INPUTS, HOST_CHOOSE_INPUTS

_OUT = ".out"


class _Form(NamedTuple):
    """A port's element type and axes: a size, or the letter of an axis of any size."""

    dtype: str
    shape: tuple[int | str, ...]


_Forms: TypeAlias = dict[str, _Form]


def check_ports(manifest: Manifest) -> None:
    """Raises EngineFileError where a role takes what nobody feeds, or lacks what is read.

    A graph may do without inputs that its model has no use for, but for its caches. Windows, by
    which the host gives pages back, are those that the models attend through.
    """
    for group in manifest.cache_groups:
        _check_window(manifest, group)
    for name, role in manifest.roles.items():
        inputs, outputs = _forms_of(manifest, name)
        _require_known(name, role.inputs, inputs)
        _require_known(name, role.outputs, outputs)
        given = {port.name for port in role.outputs}
        taken = {port.name for port in role.inputs}
        absent = [n for n in outputs if n not in given]
        absent += [n for n in inputs if n.endswith("_pool") and n not in taken]
        if absent:
            raise EngineFileError(f"role {name} has no {absent[0]}; build the engine again")


def _check_window(manifest: Manifest, group: CacheGroup) -> None:
    g, drafts = manifest.target, manifest.drafters
    wanted = next(
        (d.geometry.sliding_window for d in drafts if d.geometry and d.cache_group == group.name),
        None,
    )
    if wanted is None:
        kinds = {g.layer_types[layer] for layer in group.layers if 0 <= layer < g.layers}
        wanted = g.sliding_window if kinds == {"sliding_attention"} else 0
    if group.window != wanted:
        raise EngineFileError(
            f"cache group {group.name} has window {group.window}, its layers have {wanted}; build "
            "the engine again"
        )


def _require_known(role: str, ports: tuple[Port, ...], forms: Mapping[str, _Form]) -> None:
    names = [port.name for port in ports]
    if len(set(names)) < len(names):
        raise EngineFileError(f"role {role}: two ports share a name; build the engine again")
    for port in ports:
        form = forms.get(port.name)
        if form is None:
            raise EngineFileError(f"role {role} has no use for {port.name}; build the engine again")
        if port.dtype != form.dtype or not _agree(port.shape, form.shape):
            raise EngineFileError(
                f"role {role}: {port.name} is {port.dtype} {list(port.shape)}, expected "
                f"{form.dtype} {list(form.shape)}; build the engine again"
            )


def _agree(shape: tuple[int | str, ...], axes: tuple[int | str, ...]) -> bool:
    return len(shape) == len(axes) and all(
        isinstance(axis, str) or size == axis for size, axis in zip(shape, axes, strict=True)
    )


def _forms_of(manifest: Manifest, role: str) -> tuple[_Forms, _Forms]:
    """What a role may take, and what it gives."""
    if role == "target":
        return _target(manifest)
    if role == "commit":
        return _commit(manifest)
    if role == "choose":
        inputs = {"logits": _floats("R", manifest.target.vocab), "position": _ints("R")}
        inputs |= {name: _Form(CHOOSE_INPUTS[name].dtype, ("R",)) for name in HOST_CHOOSE_INPUTS}
        return inputs, {"choice": _ints("R"), "logprob": _floats("R")}
    if role == "accept":
        trees = {"tokens": _ints("B", "N"), "parents": _ints("B", "N"), "choice": _ints("B", "N")}
        trees |= {"ancestor_bits": _ints("B", "N", "W"), "count": _ints("B")}
        path = {"path": _ints("B", "D"), "accepted": _ints("B"), "next_token": _ints("B")}
        return trees, path
    for model in manifest.models:
        for name in model.ROLES:
            if role == model.role(name):
                return _drafting(manifest, model, name)
    raise EngineFileError(f"role {role} is of no drafter; build the engine again")


def _target(manifest: Manifest) -> tuple[_Forms, _Forms]:
    g, groups = manifest.target, _target_groups(manifest)
    inputs, outputs = _launch(), {"logits": _floats("R", g.vocab)}
    if manifest.models:
        outputs["captured"] = _floats("T", len(manifest.aux_layers) * g.hidden)
    for group in groups:
        inputs |= _view(group) | _pools(manifest, group)
        outputs |= _written(_pools(manifest, group))
        # Where each layer has a view of its own (SpecPV), its pages stand at places of their own.
        own_views = manifest.specpv is not None and group.window == 0
        position = ("Lg", "B", "P") if own_views else ("B", "P")
        inputs[f"{group.name}.page_position"] = _ints(*position)
        if group.name == INDEXER_GROUP:
            inputs[f"{group.name}.top_k"] = _ints("B")
            outputs[f"{group.name}.violations"] = _ints(len(group.layers), "B")
        if manifest.specpv is not None and group.name == choosing_group(manifest.specpv):
            table = _ints(len(group.layers), "B", group.kv_heads, "V")
            per_sequence = ("first_block", "blocks", "budget", "tree_count")
            inputs |= {f"{group.name}.{n}": _ints("B") for n in per_sequence}
            inputs[f"{group.name}.logical_pages"] = _ints("B", "L")
            inputs[f"{group.name}.partial_table"] = table
            outputs[f"{group.name}.partial_table{_OUT}"] = table
    return inputs, outputs


def _commit(manifest: Manifest) -> tuple[_Forms, _Forms]:
    inputs: _Forms = {}
    outputs: _Forms = {}
    for group in _target_groups(manifest):
        pools = {n: form for n, form in _pools(manifest, group).items() if "summary_pool" not in n}
        slots = {f"{group.name}.{side}_slot": _ints("B", "D") for side in ("from", "to")}
        inputs |= slots | pools
        outputs |= _written(pools)
    return inputs, outputs


def _drafting(manifest: Manifest, model: ModelDrafter, role: str) -> tuple[_Forms, _Forms]:
    """Of one of ``model.ROLES``."""
    draft: DraftGeometry = model.geometry
    aux_hidden = _floats("T", len(draft.aux_layers) * manifest.target.hidden)
    hidden = _floats("T", draft.hidden)
    group = manifest.group(model.cache_group)
    if role in ("draft_fuse", "draft") and isinstance(draft, DFlashGeometry):
        return _block_drafting(manifest, draft, group, role)
    if role == "draft_fuse":
        mask = isinstance(draft, PEagleGeometry)
        single = {"mask_hidden": _floats(1, draft.hidden)} if mask else {}
        return {"captured": aux_hidden}, {"hidden": hidden} | single
    if role == "expand":
        inputs = {"logits": _floats("BF", draft.vocab), "score": _floats("B", "F")}
        children = {"tokens": _ints("B", "FK"), "scores": _floats("B", "FK")}
        return inputs | {"top_k": _ints()}, children | {"frontier": _ints("B", "K")}
    if role == "select":
        inputs = {"tokens": _ints("B", "M"), "parents": _ints("B", "M")}
        inputs |= {"scores": _floats("B", "M"), "draft_tokens": _ints()}
        names = ("tree_tokens", "tree_parents", "depths")
        trees = {n: _ints("B", "N") for n in names}
        return inputs, trees | {"ancestor_bits": _ints("B", "N", "W"), "count": _ints("B")}
    inputs = _launch() | {"hidden": hidden}
    outputs = {"draft_logits": _floats("R", draft.vocab), "hidden_out": hidden}
    inputs |= _view(group) | _pools(manifest, group)
    outputs |= _written(_pools(manifest, group))
    return inputs, outputs


def _block_drafting(
    manifest: Manifest, draft: DFlashGeometry, group: CacheGroup, role: str
) -> tuple[_Forms, _Forms]:
    """The roles of a draft whose caches hold what becomes of the target's states."""
    inputs, outputs = _launch(), {"draft_logits": _floats("R", draft.vocab)}
    if role == "draft_fuse":
        states = _floats("T", len(draft.aux_layers) * manifest.target.hidden)
        inputs, outputs = {"captured": states, "positions": _ints("T")}, {}
    placed = _view(group)
    if role == "draft_fuse":
        placed = {f"{group.name}.write_slot": _ints("T")}
    inputs |= placed | _pools(manifest, group)
    outputs |= _written(_pools(manifest, group))
    return inputs, outputs


def _target_groups(manifest: Manifest) -> list[CacheGroup]:
    of_drafts = {drafter.cache_group for drafter in manifest.drafters}
    return [group for group in manifest.cache_groups if group.name not in of_drafts]


def _launch() -> _Forms:
    rows = {name: _ints("T") for name in ("token_ids", "positions")}
    return rows | {
        "row_start": _ints("B1"),
        "ancestor_bits": _ints("T", "W"),
        "logit_rows": _ints("R"),
    }


def _view(group: CacheGroup) -> _Forms:
    return {
        f"{group.name}.page_table": _ints("Lg", "B", "G", "P"),
        f"{group.name}.row_slot": _ints("T"),
        f"{group.name}.tree_start": _ints("B"),
        f"{group.name}.write_slot": _ints("T"),
    }


def _pools(manifest: Manifest, group: CacheGroup) -> _Forms:
    return {
        name: _Form(group.stored_dtype, shape)
        for name, shape in pool_shapes(group, manifest.specpv).items()
    }


def _written(pools: _Forms) -> _Forms:
    return {name + _OUT: form for name, form in pools.items()}


def _ints(*shape: int | str) -> _Form:
    return _Form("int32", shape)


def _floats(*shape: int | str) -> _Form:
    return _Form("float32", shape)
