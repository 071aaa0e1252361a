"""Which process quantizes which modules of a layer, and how all get the results.

Compensation takes about as long as running the data, so it is shared too: each group of modules has
an owner, who alone gets its moments and quantizes it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from quantkit.calibrate.moments import InputMoments, InputSummary, group_name
from quantkit.calibrate.quantized_layer import QuantizedLinear, quantize_weights
from quantkit.calibrate.ranks import Ranks
from quantkit.calibrate.skeleton import Skeleton
from quantkit.calibrate.tiers import Tiers
from quantkit.scheme import QuantSpec


def group_owners(modules: Mapping[str, nn.Linear], num_processes: int) -> dict[str, int]:
    """Return the owner of each group of modules that read one input, by its first member.

    Costly groups first, each goes to the process that has least to do.
    """
    costs: dict[str, int] = {}
    for name, module in modules.items():
        group = group_name(name, modules)
        columns = module.in_features
        # Feedback for every row, and, once for the group, factors of its moments.
        known = costs.setdefault(group, columns**3)
        costs[group] = known + module.out_features * columns**2
    loads = [0] * num_processes
    owners: dict[str, int] = {}
    for group in sorted(costs, key=lambda name: -costs[name]):
        owner = loads.index(min(loads))
        loads[owner] += costs[group]
        owners[group] = owner
    return owners


def quantize_shared(
    skeleton: Skeleton,
    modules: Mapping[str, nn.Linear],
    spec: QuantSpec,
    tiers: Tiers,
    moments: Mapping[str, InputMoments],
    changed: Collection[str],
    owners: Mapping[str, int],
    ranks: Ranks,
) -> tuple[dict[str, QuantizedLinear], dict[str, InputSummary]]:
    """As `quantize_weights`, by the owners; every process gets all modules, and what they read.

    `moments` are those of the modules that this process owns.
    """
    own = {n: m for n, m in modules.items() if owners[group_name(n, modules)] == ranks.rank}
    made = quantize_weights(skeleton, own, spec, tiers, moments, changed)
    read = {name: known.summary for name, known in moments.items()}
    linears: dict[str, QuantizedLinear] = {}
    inputs: dict[str, InputSummary] = {}
    for source, (found, seen) in enumerate(ranks.share((made, read))):
        linears |= found
        inputs |= seen
        for name, linear in found.items() if source != ranks.rank else ():
            weight = modules[name].weight
            weight.data = linear.values().to(weight.device, weight.dtype)
    return {name: linears[name] for name in modules}, inputs
