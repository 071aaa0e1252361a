"""An observer of your own: which range a static input scale covers, and what that costs.

A static scale is fixed on calibration data. The largest input of all is a plain choice; this one
takes the mean of the largest inputs of each sequence, so that one odd sequence does not make the
steps of all others coarse. It is compared with the observers that come with quantkit.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from smollm2 import model_path
from torch import Tensor

from quantkit.calibrate import calibrate
from quantkit.calibrate.observers import ObserverFactory
from quantkit.evaluate import evaluate
from quantkit.numerics import Format


class MeanOfMaxima:
    """The mean over sequences of the largest input, with some room above it."""

    def __init__(self, weight: Tensor, headroom: float = 1.25) -> None:
        """Start with nothing seen; `weight` [rows, channels] is for those that weigh errors."""
        self.headroom = headroom
        self.maxima: list[float] = []

    def update(self, x: Tensor) -> None:
        """Take in the inputs of one sequence, [tokens, channels]."""
        self.maxima.append(float(x.abs().max()))

    def range(self, fmt: Format) -> float:
        """Return the magnitude that the largest code stands for; larger inputs saturate."""
        return self.headroom * sum(self.maxima) / len(self.maxima)


OBSERVERS: dict[str, str | ObserverFactory] = {
    "largest of all": "amax",
    "least error": "error",
    "mean of maxima": MeanOfMaxima,
}


def main() -> None:
    table = Table("observer of inputs", "mean KL", "same top-1")
    for number, (name, observer) in enumerate(OBSERVERS.items()):
        folder = f"demo-out/observer-{number}"
        print(f"{name}: {folder}")
        calibrate(
            model_path(),
            folder,
            recipe="fp8-static",
            observer=observer,
            kv="none",
            samples=16,
            seq_len=256,
            budget=0,  # all modules are quantized, so that nothing else differs
        )
        # It rounds inputs with the checkpoint's scales, as servers do.
        result = evaluate(folder, model_path(), max_tokens=1024, window=256)
        [measured] = [found.divergence for found in result.measurements]
        assert measured is not None
        table.add_row(name, f"{measured.mean_kl:.4f}", f"{measured.top1_agreement:.1%}")
    Console().print(table)


if __name__ == "__main__":
    main()
