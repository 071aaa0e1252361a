"""How much quantizing each group of modules would change the model's predictions.

For small changes the divergence of the predictions is a quadratic form: with g the gradient of the
log-probability of a token drawn from the model's own prediction, and d what quantization changes in
a module's output, `KL ~ E[(g . d)^2] / 2` (g g^T in expectation is the Fisher information, which is
the Hessian of the KL). One backward pass gives g for every module at once; d is the module run with
quantized weight and input on the same tokens.

Layers are loaded one at a time, twice: forwards to record what enters each, and backwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quantkit.calibrate.batches import Batch
from quantkit.calibrate.groups import engine_group
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.progress import Phase
from quantkit.calibrate.quantized_layer import fake_quantize_input
from quantkit.errors import CalibrationError
from quantkit.numerics import amax_to_scale
from quantkit.scheme import QuantSpec

MIN_TOKENS, MIN_SEQUENCES = 1024, 2
"""Enough to rank modules, and not on one text alone."""


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """Predicted divergence in nats a token, by module.

    A fused group has one value for all, and so have all experts of a layer, under the list's name.
    """

    predicted_kl: dict[str, float]
    num_tokens: int


class SensitivityProbe:
    """Measures `Sensitivity` for one way of plain rounding."""

    def __init__(
        self,
        model: LayerwiseModel,
        modules: Mapping[str, nn.Linear],
        weights: QuantSpec,
        inputs: QuantSpec | None,
        quiet: bool = False,
    ) -> None:
        self._model = model
        self._modules = modules
        self._weights = weights
        self._inputs = inputs
        self._quiet = quiet
        self._squares: dict[str, float] = {}
        # Of the loaded layer: its rounded weights, and the input that was rounded last.
        self._rounded: dict[nn.Linear, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def measure(self, batches: Sequence[Tensor]) -> Sensitivity:
        """Run the first sequences of the batches, as many as are enough, one at a time.

        Shapes: each batch [sequences, tokens] int64. What batches the sequences come in changes
        nothing. Raises CalibrationError for a model that cannot be differentiated.
        """
        ids = _first_sequences(batches)
        prepared = self._model.prepare(ids)
        try:
            self._measure(ids, prepared, torch.Generator().manual_seed(0))
        except (RuntimeError, TypeError) as error:
            raise CalibrationError(
                f"the model cannot be differentiated ({error}), so no module can be chosen to "
                "stay as it is; use --budget 0"
            ) from error
        num_tokens = sum(tokens.numel() for tokens in ids)
        kl = {name: square / (2 * num_tokens) for name, square in self._squares.items()}
        return Sensitivity(kl, num_tokens)

    def _measure(
        self, ids: Sequence[Tensor], batches: Sequence[Batch], generator: torch.Generator
    ) -> None:
        model, skeleton = self._model, self._model.skeleton
        names = skeleton.layer_names
        entering = [[batch.hidden for batch in batches]]
        with Phase("sensitivity", 2 * len(names), quiet=self._quiet) as phase, torch.no_grad():
            for number, name in enumerate(names):
                pairs = zip(batches, entering[-1], strict=True)
                with skeleton.visit(name):
                    entering.append([model.output(number, *pair) for pair in pairs])
                phase.advance()
            with skeleton.visit(""):
                gradients = [
                    self._head_gradient(*pair, generator)
                    for pair in zip(ids, entering.pop(), strict=True)
                ]
            for number, name in reversed(list(enumerate(names))):
                triples = zip(batches, entering.pop(), gradients, strict=True)
                with skeleton.visit(name):
                    gradients = [self._back(number, *triple) for triple in triples]
                self._rounded.clear()
                self._last = None
                phase.advance()

    def _head_gradient(self, ids: Tensor, hidden: Tensor, generator: torch.Generator) -> Tensor:
        """Return the gradient of log p(drawn tokens) at the last layer's output."""
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            logits = self._model.logits(ids, leaf)
        share = logits.detach().flatten(0, -2).softmax(-1, dtype=torch.float32)
        drawn = _draw(share, generator)
        # At the logits the gradient is 1 for the drawn token less its share, -share for others.
        at_logits = share.neg_().scatter_add_(1, drawn, torch.ones_like(share[:, :1]))
        return torch.autograd.grad(logits, leaf, at_logits.view_as(logits).to(logits.dtype))[0]

    def _back(self, number: int, batch: Batch, hidden: Tensor, gradient: Tensor) -> Tensor:
        """Add up one layer's modules; return the gradient at the layer's input."""
        prefix = f"{self._model.skeleton.layer_names[number]}."
        inside = {n: m for n, m in self._modules.items() if n.startswith(prefix)}
        with torch.enable_grad(), self._hooks(inside):
            leaf = hidden.detach().requires_grad_()
            output = self._model.output(number, batch, leaf)
            return torch.autograd.grad(output, leaf, gradient)[0]

    @contextmanager
    def _hooks(self, modules: Mapping[str, nn.Linear]) -> Iterator[None]:
        handles = [m.register_forward_hook(self._hook(n)) for n, m in modules.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, name: str) -> Any:
        group = engine_group(name, self._modules)

        def observe(module: nn.Linear, args: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad or not output.numel():
                return
            change = self._change(module, args[0], output.detach())

            def take(gradient: Tensor) -> None:
                products = (gradient.float() * change).sum(dim=-1)
                square = products.square().sum(dtype=torch.float64).item()
                self._squares[group] = self._squares.get(group, 0.0) + square

            output.register_hook(take)  # type: ignore[no-untyped-call]

        return observe

    def _change(self, module: nn.Linear, x: Tensor, output: Tensor) -> Tensor:
        """Return what plain rounding of weight and input does to a module's output, float32."""
        with torch.no_grad():
            seen = self._rounded_input(x)
            return F.linear(seen, self._rounded_weight(module), module.bias).float().sub_(output)

    def _rounded_weight(self, module: nn.Linear) -> Tensor:
        """Return a weight of the loaded layer after plain rounding."""
        if module not in self._rounded:
            self._rounded[module] = fake_quantize_input(module.weight, None, self._weights)
        return self._rounded[module]

    def _rounded_input(self, x: Tensor) -> Tensor:
        """Return what a module sees of its input; siblings that read one tensor round it once."""
        if self._inputs is None:
            return x
        if self._last is None or self._last[0] is not x:
            self._last = (x, fake_quantize_input(x, self._input_scale(x), self._inputs))
        return self._last[1]

    def _input_scale(self, x: Tensor) -> Tensor | None:
        spec = self._inputs
        if spec is None or spec.dynamic:
            return None
        return amax_to_scale(x.abs().amax().float().reshape(1), spec.fmt)


def _draw(share: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token from each row's distribution, with one random number a row.

    torch.multinomial makes one for every token of the vocabulary, which takes ten times as long as
    all else at the head. Shapes: share float32 [rows, vocab] -> int64 [rows, 1].
    """
    below = share.cumsum(dim=-1)
    random = torch.rand(len(share), 1, generator=generator).to(share.device)
    # A random number below the total finds a token that has a share of it.
    return torch.searchsorted(below, random * below[:, -1:], right=True).clamp_(
        max=share.shape[-1] - 1
    )


def _first_sequences(batches: Sequence[Tensor]) -> list[Tensor]:
    """Return MIN_SEQUENCES, each [1, tokens], or as many as hold MIN_TOKENS; all if too few."""
    chosen: list[Tensor] = []
    for row in (row for batch in batches for row in torch.split(batch, 1)):
        has_tokens = sum(tokens.numel() for tokens in chosen) >= MIN_TOKENS
        if has_tokens and len(chosen) >= MIN_SEQUENCES:
            break
        chosen.append(row)
    return chosen
