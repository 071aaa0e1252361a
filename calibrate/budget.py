"""Which modules stay as they are, because a byte buys most accuracy there.

Owns the choice under the recipe's budget; what each group of modules costs in divergence comes from
`sensitivity`, and what it costs in bytes from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor, nn

from quantkit.calibrate.groups import engine_group
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.plan import Plan
from quantkit.calibrate.sensitivity import Sensitivity, SensitivityProbe
from quantkit.calibrate.skeleton import Skeleton


def quantized_linears(plan: Plan, skeleton: Skeleton) -> dict[str, nn.Linear]:
    """Return the modules that the plan quantizes, by full module name."""
    names = {module.name for module in plan.quantized}
    linears = skeleton.linear_modules()
    return {name: m for name, m in linears.items() if skeleton.disk_name(name) in names}


def measure_sensitivity(
    plan: Plan,
    model: LayerwiseModel,
    batches: Sequence[Tensor],
    progress: bool,
) -> Sensitivity | None:
    """Predict what each group of modules costs, where the recipe may keep some; by disk names."""
    recipe, skeleton = plan.recipe, model.skeleton
    if not recipe.tiers.budget or not batches:
        return None
    modules = {
        name: module
        for name, module in quantized_linears(plan, skeleton).items()
        if any(name.startswith(f"{layer}.") for layer in skeleton.layer_names)
    }
    probe = SensitivityProbe(model, modules, recipe.weights, recipe.inputs, not progress)
    found = probe.measure(batches)
    by_name = {skeleton.disk_name(name): kl for name, kl in found.predicted_kl.items()}
    return Sensitivity(by_name, found.num_tokens)


def keep_sensitive(plan: Plan, sensitivity: Sensitivity | None) -> Plan:
    """Leave the most sensitive groups as they are, as far as the budget goes."""
    if sensitivity is None:
        return plan
    # The budget is that of the layers: nothing predicts what the head costs.
    modules = {m.name: m for m in plan.quantized if m.layer is not None}
    members: dict[str, list[str]] = {}
    for name in modules:
        members.setdefault(engine_group(name, modules), []).append(name)
    cost = {
        group: sum(modules[n].source_bytes - modules[n].target_bytes for n in names)
        for group, names in members.items()
    }
    allowed = plan.recipe.tiers.budget * sum(prod(module.shape) for module in modules.values())
    spare = int(allowed) - sum(module.target_bytes for module in modules.values())
    kept = choose_kept(sensitivity.predicted_kl, cost, spare)
    return plan.keeping({name for group in kept for name in members[group]})


def choose_kept(
    predicted_kl: Mapping[str, float], cost: Mapping[str, int], spare_bytes: int
) -> frozenset[str]:
    """Return the groups where a byte buys most divergence, within `spare_bytes`.

    Greedy by divergence per byte; a group that no longer fits is passed over. `cost` is what
    keeping a group adds, in bytes; both are by group, and groups that cost nothing are not kept.
    """
    kept = set()
    ranked = sorted(predicted_kl, key=lambda g: (-predicted_kl[g] / max(cost.get(g, 0), 1), g))
    for group in ranked:
        if 0 < cost.get(group, 0) <= spare_bytes and predicted_kl[group] > 0:
            kept.add(group)
            spare_bytes -= cost[group]
    return frozenset(kept)
