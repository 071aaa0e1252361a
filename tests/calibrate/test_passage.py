"""Batches that stop on their way through a layer compute what uninterrupted runs compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from quantkit.calibrate.groups import expert_of
from quantkit.calibrate.kv_scales import KvObserver
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.calibrate.moments import InputMoments, MomentObservers, group_name
from quantkit.calibrate.moving import Moving
from quantkit.calibrate.passage import HeldPassage, Passage, RepeatedPassage
from quantkit.scheme import Granularity, QuantSpec
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
Groups = list[dict[str, nn.Linear]]


def batches() -> list[Tensor]:
    """Three batches of different shapes."""
    rows = [torch.stack([tiny.random_ids(20, seed) for seed in (1, 2)])]
    return [*rows, tiny.random_ids(9, 3)[None], tiny.random_ids(7, 4)[None]]


def start(folder: Path) -> tuple[LayerwiseModel, Moving]:
    model = LayerwiseModel(models.open_skeleton(folder))
    return model, model.start(batches())


def linears_of(model: LayerwiseModel, number: int) -> dict[str, nn.Linear]:
    prefix = f"{model.skeleton.layer_names[number]}."
    linears = model.skeleton.linear_modules()
    return {name: module for name, module in linears.items() if name.startswith(prefix)}


def groups_of(model: LayerwiseModel, number: int, moving: Moving) -> Groups:
    """Return a layer's linears in groups, as they read; a layer with experts has none."""
    linears, order = linears_of(model, number), list[str]()
    handles = [
        module.register_forward_pre_hook(lambda module, args, name=name: order.append(name))
        for name, module in linears.items()
    ]
    with moving.first_batch() as batch:
        list(model.run(number, [batch]))
    for handle in handles:
        handle.remove()
    groups: dict[str, dict[str, nn.Linear]] = {}
    for name in order:
        groups.setdefault(group_name(name, linears), {})[name] = linears[name]
    return [] if any(map(expert_of, linears)) else list(groups.values())


def change(modules: dict[str, nn.Linear]) -> None:
    """Do what quantization does: a weight is another one after its stop."""
    for module in modules.values():
        module.weight.data = module.weight.data.clone().mul_(0.75).to(module.weight.dtype)


def passage_of(
    holds: bool,
    model: LayerwiseModel,
    number: int,
    moving: Moving,
    groups: Groups,
    observer: KvObserver | None = None,
) -> Passage:
    if not holds:
        return RepeatedPassage(model, number, moving, observer)
    stops = [next(iter(group.values())) for group in groups]
    return HeldPassage(model, number, moving, stops, observer)


held, repeated = partial(passage_of, True), partial(passage_of, False)


@torch.no_grad()
def pass_all(
    folder: Path, make: Callable[..., Passage]
) -> tuple[list[dict[str, InputMoments]], list[Tensor]]:
    """Return what each layer's linears read, weights being changed after it, and what comes out."""
    model, moving = start(folder)
    found: list[dict[str, InputMoments]] = []
    for number, name in enumerate(model.skeleton.layer_names):
        model.skeleton.load(name)
        groups, seen = groups_of(model, number, moving), {}
        with make(model, number, moving, groups) as passage:
            for modules in groups:
                observers = MomentObservers(modules)
                passage.show(list(modules.values()), [observers])
                seen |= observers.finish()
                change(modules)
            for batch, output in passage.finish():
                batch.hidden = output
        layer = model.skeleton.layers[number]
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())
        model.skeleton.unload(name)
        found.append(seen)
    return found, [batch.hidden for block in moving.rounds() for batch in block]


@pytest.mark.parametrize("kind", models.CONFIGS)
def test_held_batches_read_and_compute_what_repeated_ones_do(model_of: ModelOf, kind: str) -> None:
    seen, outputs = pass_all(model_of(kind), held)
    expected, wanted = pass_all(model_of(kind), repeated)
    assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))
    for layer, other in zip(seen, expected, strict=True):
        assert layer.keys() == other.keys()
        for name, moments in layer.items():
            assert torch.equal(moments.fit, other[name].fit), name
            assert torch.equal(moments.amax, other[name].amax), name
            assert moments.num_tokens == other[name].num_tokens == 20 * 2 + 9 + 7, name


@torch.no_grad()
def test_a_held_batch_multiplies_once(model_of: ModelOf) -> None:
    model, moving = start(model_of("llama"))
    model.skeleton.load(model.skeleton.layer_names[0])
    groups, times = groups_of(model, 0, moving), list[str]()
    for name, module in linears_of(model, 0).items():
        module.register_forward_hook(lambda module, args, output, name=name: times.append(name))
    with held(model, 0, moving, groups) as passage:
        for number, modules in enumerate(groups):
            passage.show(list(modules.values()), [])
            assert len(times) == 3 * sum(len(group) for group in groups[:number])
        list(passage.finish())
    assert sorted(times) == sorted([*linears_of(model, 0)] * 3)


class TestStrays:
    """A batch that takes another way than the stops is run from the beginning."""

    @pytest.fixture
    def ways(self, model_of: ModelOf) -> Iterator[Callable[[Callable[..., Passage]], Any]]:
        def run(make: Callable[..., Passage]) -> tuple[list[int], list[Tensor]]:
            model, moving = start(model_of("llama"))
            model.skeleton.load(model.skeleton.layer_names[0])
            groups, attention = groups_of(model, 0, moving), model.skeleton.layers[0].self_attn
            original = attention.forward

            def forward(hidden_states: Tensor, **kwargs: Any) -> Any:
                if hidden_states.shape[1] == 9:  # one batch's attention does nothing
                    return torch.zeros_like(hidden_states), None
                return original(hidden_states, **kwargs)

            attention.forward = forward
            tokens, outputs = list[int](), list[Tensor]()
            with torch.no_grad(), make(model, 0, moving, groups) as passage:
                for modules in groups:
                    observers = MomentObservers(modules)
                    passage.show(list(modules.values()), [observers])
                    tokens.append(next(iter(observers.finish().values())).num_tokens)
                    change(modules)
                outputs = [output for _, output in passage.finish()]
            return tokens, outputs

        return run

    def test_they_read_and_compute_the_same(self, ways: Callable[..., Any]) -> None:
        tokens, outputs = ways(held)
        expected, wanted = ways(repeated)
        assert tokens == expected == [47, 47, 56, 56]
        assert all(torch.equal(one, other) for one, other in zip(outputs, wanted, strict=True))


class TestKvObserver:
    @staticmethod
    def scales(folder: Path, make: Callable[..., Passage]) -> dict[str, Tensor]:
        model, moving = start(folder)
        name, found = model.skeleton.layer_names[0], KvObserver(QuantSpec(Granularity.HEAD))
        model.skeleton.load(name)
        groups = groups_of(model, 0, moving)
        with torch.no_grad(), make(model, 0, moving, groups, found) as passage:
            for modules in groups:
                passage.show(list(modules.values()), [])
            list(passage.finish())
        return found.scales(name)

    @pytest.mark.parametrize("kind", ["llama", "gemma3", "falcon", "bloom", "gpt-neox"])
    def test_the_scales_and_their_owner_are_the_same(self, model_of: ModelOf, kind: str) -> None:
        one = self.scales(model_of(kind), held)
        other = self.scales(model_of(kind), repeated)
        assert one.keys() == other.keys()
        assert all(torch.equal(scale, other[name]) for name, scale in one.items())


class TestErrors:
    @pytest.mark.parametrize("make", [held, repeated], ids=["held", "repeated"])
    def test_nothing_is_left_of_a_passage_that_fails(
        self, model_of: ModelOf, make: Callable[..., Passage]
    ) -> None:
        model, moving = start(model_of("llama"))
        model.skeleton.load(model.skeleton.layer_names[0])
        groups, lookup = groups_of(model, 0, moving), AttentionInterface.get_interface
        layer = model.skeleton.layers[0]
        observer = KvObserver(QuantSpec(Granularity.TENSOR))
        passage = make(model, 0, moving, groups, observer)

        def fail(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            if args[0].shape[1] == 9:
                raise ValueError("no")

        with passage:
            failing = layer.mlp.register_forward_pre_hook(fail)
            passage.show(list(groups[0].values()), [])
            passage.show(list(groups[1].values()), [])
            with pytest.raises(ValueError, match="no"):  # one batch is past it, one not there yet
                passage.show(list(groups[2].values()), [])
        failing.remove()
        assert AttentionInterface.get_interface is lookup
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in layer.modules())
        assert not any("forward" in vars(module) for module in layer.modules())
        caches = [batch.cache for block in moving.rounds() for batch in block]
        assert all(cache.observer is None for cache in caches)


class TestRepeated:
    """A run that ends early has shown its watchers all that a whole one would have."""

    @staticmethod
    def inputs(folder: Path, ends: bool) -> list[dict[str, InputMoments]]:
        """Return what the linears of each layer read."""
        model, moving = start(folder)
        found = []
        for number, name in enumerate(model.skeleton.layer_names):
            inside = linears_of(model, number)
            model.skeleton.load(name)
            observers, passage = MomentObservers(inside), RepeatedPassage(model, number, moving)
            if ends:
                passage.show(list(inside.values()), [observers])
            else:
                list(model.watch(number, moving.rounds(), [observers]))
            found.append(observers.finish())
            for batch, output in passage.finish():
                batch.hidden = output
            model.skeleton.unload(name)
        return found

    @pytest.mark.parametrize("kind", models.CONFIGS)
    def test_watchers_miss_nothing(self, model_of: ModelOf, kind: str) -> None:
        whole = self.inputs(model_of(kind), ends=False)
        early = self.inputs(model_of(kind), ends=True)
        assert [layer.keys() for layer in early] == [layer.keys() for layer in whole]
        for one, other in zip(early, whole, strict=True):
            for name, moments in one.items():
                assert torch.equal(moments.fit, other[name].fit), name
                assert torch.equal(moments.amax, other[name].amax), name
                assert moments.num_tokens == other[name].num_tokens, name

    @staticmethod
    def ends(model: LayerwiseModel, moving: Moving, modules: list[nn.Linear]) -> int:
        """Return how many runs of the first layer come to its end."""
        ended = list[int]()
        layer = model.skeleton.layers[0]
        handle = layer.register_forward_hook(lambda module, args, output: ended.append(1))
        RepeatedPassage(model, 0, moving).show(modules, [])
        handle.remove()
        return len(ended)

    def test_all_runs_but_the_first_end(self, model_of: ModelOf) -> None:
        model, moving = start(model_of("llama"))
        model.skeleton.load(model.skeleton.layer_names[0])
        assert self.ends(model, moving, list(linears_of(model, 0).values())) == 1

    def test_where_a_module_reads_twice_no_run_ends(self, model_of: ModelOf) -> None:
        model, moving = start(model_of("llama"))
        model.skeleton.load(model.skeleton.layer_names[0])
        mlp = model.skeleton.layers[0].mlp
        mlp.register_forward_hook(
            lambda module, args, output: mlp.up_proj(args[0])[..., :1] + output
        )
        assert self.ends(model, moving, [m for m in mlp.modules() if type(m) is nn.Linear]) == 3
