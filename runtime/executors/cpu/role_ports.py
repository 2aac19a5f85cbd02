"""The inputs and outputs of every role, as the host feeds and reads them.

They are named in docs/developers/contracts.md#graphs.
"""

from __future__ import annotations

from collections.abc import Mapping

from specbuild.runtime.engine_dir.cache_groups import choosing_group
from specbuild.runtime.engine_dir.claims_check import pool_shapes, state_pools
from specbuild.runtime.engine_dir.drafters.record import ModelRecord, PortContext
from specbuild.runtime.engine_dir.manifest import (
    INDEXER_GROUP,
    CacheGroup,
    Manifest,
    Port,
    StateGroup,
)
from specbuild.runtime.engine_dir.port_forms import (
    OUT,
    Form,
    Forms,
    floats,
    ints,
    launch_forms,
    path_forms,
    view_forms,
    written,
)
from specbuild.runtime.errors import OutdatedEngineError
from specbuild.runtime.sampling import CHOOSE_INPUTS, HOST_CHOOSE_INPUTS


def check_ports(manifest: Manifest) -> None:
    """Raise EngineFileError if a role has unknown inputs, or lacks outputs that are read.

    A graph may omit inputs that its model does not need, except for its caches. Windows, by which
    the host releases pages, must be those of the models' attention.
    """
    for group in manifest.cache_groups:
        _check_window(manifest, group)
    for name, role in manifest.roles.items():
        inputs, outputs = _forms_of(manifest, name)
        _require_known(name, role.inputs, inputs)
        _require_known(name, role.outputs, outputs)
        output_names = {port.name for port in role.outputs}
        input_names = {port.name for port in role.inputs}
        absent = [n for n in outputs if n not in output_names]
        absent += [n for n in inputs if n.endswith("_pool") and n not in input_names]
        if absent:
            raise OutdatedEngineError(f"role {name} has no {absent[0]}")


def _check_window(manifest: Manifest, group: CacheGroup) -> None:
    g, drafts = manifest.target, manifest.drafters
    window = next(
        (d.geometry.sliding_window for d in drafts if d.geometry and d.cache_group == group.name),
        None,
    )
    if window is None:
        kinds = {g.layer_types[layer] for layer in group.layers if 0 <= layer < g.layers}
        window = g.sliding_window if kinds == {"sliding_attention"} else 0
    if group.window != window:
        raise OutdatedEngineError(
            f"cache group {group.name} has window {group.window}, its layers have {window}"
        )


def _require_known(role: str, ports: tuple[Port, ...], forms: Mapping[str, Form]) -> None:
    names = [port.name for port in ports]
    if len(set(names)) < len(names):
        raise OutdatedEngineError(f"role {role}: two ports share a name")
    for port in ports:
        form = forms.get(port.name)
        if form is None:
            raise OutdatedEngineError(f"role {role} has no use for {port.name}")
        if port.dtype != form.dtype or not _agree(port.shape, form.shape):
            raise OutdatedEngineError(
                f"role {role}: {port.name} is {port.dtype} {list(port.shape)}, expected "
                f"{form.dtype} {list(form.shape)}"
            )


def _agree(shape: tuple[int | str, ...], axes: tuple[int | str, ...]) -> bool:
    return len(shape) == len(axes) and all(
        isinstance(axis, str) or size == axis for size, axis in zip(shape, axes, strict=True)
    )


def _forms_of(manifest: Manifest, role: str) -> tuple[Forms, Forms]:
    """Return the possible inputs and the outputs of a role."""
    if role == "target":
        return _target(manifest)
    if role == "commit":
        return _commit(manifest)
    if role == "choose":
        inputs = {"logits": floats("R", manifest.target.vocab), "position": ints("R")}
        inputs |= {name: Form(CHOOSE_INPUTS[name].dtype, ("R",)) for name in HOST_CHOOSE_INPUTS}
        return inputs, {"choice": ints("R"), "logprob": floats("R")}
    if role == "accept":
        trees = {"tokens": ints("B", "N"), "parents": ints("B", "N"), "choice": ints("B", "N")}
        trees |= {"ancestor_bits": ints("B", "N", "W"), "count": ints("B")}
        path = {"path": ints("B", "D"), "accepted": ints("B"), "next_token": ints("B")}
        return trees, path
    for model in manifest.models:
        for name in model.ROLES:
            if role == model.role(name):
                return _drafting(manifest, model, name)
    raise OutdatedEngineError(f"role {role} is of no drafter")


def _target(manifest: Manifest) -> tuple[Forms, Forms]:
    g, groups = manifest.target, _target_groups(manifest)
    inputs, outputs = launch_forms(), {"logits": floats("R", g.vocab)}
    if manifest.models:
        outputs["captured"] = floats("T", len(manifest.aux_layers) * g.hidden)
    for group in groups:
        inputs |= view_forms(group.name) | _pools(manifest, group)
        outputs |= written(_pools(manifest, group))
        # If each layer has its own view (SpecPV), its pages have their own positions.
        own_views = manifest.specpv is not None and group.window == 0
        position = ("Lg", "B", "P") if own_views else ("B", "P")
        inputs[f"{group.name}.page_position"] = ints(*position)
        if group.name == INDEXER_GROUP:
            inputs[f"{group.name}.top_k"] = ints("B")
            outputs[f"{group.name}.violations"] = ints(len(group.layers), "B")
        if manifest.specpv is not None and group.name == choosing_group(manifest.specpv):
            table = ints(len(group.layers), "B", group.kv_heads, "V")
            per_sequence = ("first_block", "blocks", "budget", "tree_count")
            inputs |= {f"{group.name}.{n}": ints("B") for n in per_sequence}
            inputs[f"{group.name}.logical_pages"] = ints("B", "L")
            inputs[f"{group.name}.partial_table"] = table
            outputs[f"{group.name}.partial_table{OUT}"] = table
    for states in manifest.state_groups:
        pools = _state_pools(states)
        inputs |= path_forms(states.name) | pools
        outputs |= written(pools) | _state_inputs(states)
    return inputs, outputs


def _commit(manifest: Manifest) -> tuple[Forms, Forms]:
    inputs: Forms = {}
    outputs: Forms = {}
    for group in _target_groups(manifest):
        pools = {n: form for n, form in _pools(manifest, group).items() if "summary_pool" not in n}
        slots = {f"{group.name}.{side}_slot": ints("B", "D") for side in ("from", "to")}
        inputs |= slots | pools
        outputs |= written(pools)
    for states in manifest.state_groups:
        pools = _state_pools(states)
        inputs |= path_forms(states.name) | pools | _state_inputs(states)
        outputs |= written(pools)
    return inputs, outputs


def _drafting(manifest: Manifest, model: ModelRecord, role: str) -> tuple[Forms, Forms]:
    """Return the ports of one of ``model.ROLES``."""
    target, group = manifest.target, manifest.group(model.cache_group)
    layers = model.geometry.target_layers(target)
    groups = [group]
    if layers:
        groups = [g for g in _target_groups(manifest) if set(layers) & set(g.layers)]
    view: Forms = {}
    pools: Forms = {}
    for read in groups:
        unread = {
            f"{read.name}.{layer}." for layer in read.layers if layers and layer not in layers
        }
        view |= view_forms(read.name)
        pools |= {
            name: form
            for name, form in _pools(manifest, read).items()
            if not name.startswith(tuple(unread)) and "summary_pool" not in name
        }
    return model.ports(role, PortContext(target.hidden, group.name, view, pools))


def _target_groups(manifest: Manifest) -> list[CacheGroup]:
    of_drafts = {drafter.cache_group for drafter in manifest.drafters}
    return [group for group in manifest.cache_groups if group.name not in of_drafts]


def _pools(manifest: Manifest, group: CacheGroup) -> Forms:
    return {
        name: Form(group.stored_dtype, shape)
        for name, shape in pool_shapes(group, manifest.specpv).items()
    }


def _state_pools(group: StateGroup) -> Forms:
    return {name: Form(*form) for name, form in state_pools(group).items()}


def _state_inputs(group: StateGroup) -> Forms:
    """Return the inputs of states from the rows of a launch, from which ``commit`` recomputes."""
    return {f"{group.name}.{layer}.inputs": floats("T", group.row_width) for layer in group.layers}
