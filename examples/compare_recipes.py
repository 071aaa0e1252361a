"""Which recipe for which use: bytes, and how far the predictions are from the original's.

`fp8-dynamic` loads in every server; `fp8-accurate` is for quantkit's own runtime. Plain rounding
shows what the tiers of accuracy are worth. Run it with a model, or on the packaged one.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from smollm2 import model_path

from quantkit.calibrate import calibrate
from quantkit.evaluate import evaluate

VARIANTS: dict[str, str | None] = {
    "fp8-dynamic": None,
    "fp8-dynamic, plain rounding": "none",
    "fp8-accurate": None,
}
"""Recipes, and the tiers to use: all that the recipe has, or none."""


def main() -> None:
    table = Table("recipe", "MB", "mean KL", "same top-1", "with FP8 KV cache")
    for number, (name, tiers) in enumerate(VARIANTS.items()):
        folder = f"demo-out/compare-{number}"
        recipe = name.partition(",")[0]
        report = calibrate(
            model_path(), folder, recipe=recipe, tiers=tiers, samples=16, seq_len=256
        )
        result = evaluate(folder, model_path(), max_tokens=1024, window=256)
        plain, cached = (found.divergence for found in result.measurements)
        assert plain is not None
        assert cached is not None
        table.add_row(
            name,
            f"{report.plan.target_bytes / 1e6:.1f}",
            f"{plain.mean_kl:.4f}",
            f"{plain.top1_agreement:.1%}",
            f"{cached.mean_kl:.4f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
