"""Layers on several devices: where they go, and that the decoder's tensors meet on one device.

Placement is arithmetic. Whether anything stays behind on the wrong GPU is seen without one: fake
tensors have a device and no data, and torch refuses to combine those of two devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from quantkit import load_fp8
from quantkit.bench.random_weights import LLAMA_3_8B, RandomWeights, random_decoder
from quantkit.checkpoint import open_checkpoint
from quantkit.errors import UnsupportedError
from quantkit.runtime import placement
from quantkit.runtime.decoder import Decoder
from quantkit.runtime.kv_cache import CacheStep
from quantkit.runtime.loading import load_engine
from quantkit.runtime.module_places import ModulePlaces, budgets
from quantkit.runtime.placement import Placement, place_by_bytes, place_by_name, split
from quantkit.runtime.weights import WeightReader
from tests import checkpoints, tiny

GPUS = [torch.device("cuda", number) for number in range(4)]
CPU = torch.device("cpu")


def least_fullest(sizes: list[int], capacities: list[int]) -> float:
    """Return what the best split gives, of all splits there are."""
    least = float("inf")
    for cuts in combinations_with_replacement(range(len(sizes) + 1), len(capacities) - 1):
        ends = [0, *cuts, len(sizes)]
        runs = [sum(sizes[a:b]) for a, b in pairwise(ends)]
        least = min(least, max(run / c for run, c in zip(runs, capacities, strict=True)))
    return least


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=7),
    st.lists(st.integers(1, 50), min_size=1, max_size=4),
)
def test_no_split_leaves_the_fullest_device_emptier(
    sizes: list[int], capacities: list[int]
) -> None:
    placed = split(sizes, capacities)
    assert placed == sorted(placed)
    assert set(placed) <= set(range(len(capacities)))
    assert placement.fullest(sizes, capacities, placed) == least_fullest(sizes, capacities)


@pytest.mark.parametrize(
    ("sizes", "capacities", "expected"),
    [
        ([1, 1, 1, 1], [10, 10], [0, 0, 1, 1]),
        ([4, 1, 1, 1, 1], [10, 10], [0, 1, 1, 1, 1]),
        ([1, 1, 1, 1], [30, 10], [0, 0, 0, 1]),
        ([5], [10], [0]),
        ([2, 2], [1, 1, 1], [0, 1]),  # fits nowhere: placed all the same
    ],
)
def test_some_splits(sizes: list[int], capacities: list[int], expected: list[int]) -> None:
    placed = split(sizes, capacities)
    assert placement.fullest(sizes, capacities, placed) == placement.fullest(
        sizes, capacities, expected
    )
    if len(capacities) == 2:
        assert placed == expected


def test_auto_takes_as_few_gpus_as_leave_room() -> None:
    sizes, free = [10, *[20] * 4, 10], [100, 100, 100, 100]
    assert place_by_bytes("auto", sizes, GPUS, free).devices == tuple(GPUS[:2])
    assert place_by_bytes("auto", sizes, GPUS, [200] * 4).devices == (GPUS[0],)
    assert place_by_bytes("balanced", sizes, GPUS[:3], free[:3]).devices == tuple(GPUS[:3])


def test_auto_fills_all_gpus_rather_than_refuse() -> None:
    placed = place_by_bytes("auto", [10, *[20] * 4, 10], GPUS[:2], [60, 60])
    assert placed.layers == (GPUS[0], GPUS[0], GPUS[1], GPUS[1])
    assert (placed.embedding, placed.norm, placed.head) == (GPUS[0], GPUS[1], GPUS[1])
    with pytest.raises(UnsupportedError, match=r"take 0\.0 GB, and 2 GPUs have 0\.0 GB free"):
        place_by_bytes("auto", [10, *[20] * 4, 10], GPUS[:2], [40, 40])


def test_the_longest_name_counts() -> None:
    placed = place_by_name(
        {"": 0, "model.layers": "cuda:1", "model.layers.2": GPUS[2], "lm_head": "cpu"}, 4
    )
    assert placed.layers == (GPUS[1], GPUS[1], GPUS[2], GPUS[1])
    assert (placed.embedding, placed.norm, placed.head) == (GPUS[0], GPUS[0], CPU)
    assert placed.devices == (GPUS[0], GPUS[1], GPUS[2], CPU)
    # Layer 1 does not hold layer 10, though its name begins that of 10.
    ten = place_by_name({"": 0, "model.layers.1": 1}, 11)
    assert ten.layers == (GPUS[0], GPUS[1], *[GPUS[0]] * 9)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model.layers.0.mlp": 0}, r"names 'model.layers.0.mlp'; it places model.embed_tokens"),
        ({"model.layer.0": 0}, r"names 'model.layer.0'"),
        ({"model.layers": 0, "lm_head": 0}, r"says nothing about model.embed_tokens"),
        ({"model": 0}, r"says nothing about lm_head"),
        ({"": "disk"}, r"places '' on 'disk'; use cpu, cuda:N or the number of a GPU"),
        ({"": -1}, r"places '' on -1"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused(
    device_map: dict[str, str | int], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        place_by_name(device_map, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    return checkpoints.build(
        made, checkpoints.FAMILIES["llama"](), checkpoints.SCHEMES["dynamic"], "fp8"
    )


def test_every_tensor_of_a_checkpoint_is_in_one_part(folder: Path) -> None:
    reader = WeightReader(open_checkpoint(folder), CPU, torch.float32)
    stored = reader.stored_bytes()
    layers = reader.checkpoint.config["num_hidden_layers"]
    sizes = placement.part_sizes(stored, layers)
    embedding = stored["model.embed_tokens.weight"]
    tied = 0 if "lm_head.weight" in stored else embedding
    assert sum(sizes) == sum(stored.values()) + tied
    assert sizes[0] == embedding
    assert sizes[2] == sum(size for name, size in stored.items() if ".layers.1." in name)


@torch.inference_mode()
def test_a_map_of_one_device_changes_nothing(folder: Path) -> None:
    ids = tiny.random_ids(12).view(1, 12)
    plain = load_engine(folder)
    for device_map in ({"": "cpu"}, "auto", "balanced"):
        if device_map != {"": "cpu"} and torch.cuda.is_available():
            continue
        engine = load_engine(folder, device_map=device_map)
        assert isinstance(engine, Decoder)
        assert torch.equal(engine.logits(ids), plain.logits(ids))
    by_layer = {"model": "cpu", "model.layers.1": "cpu", "lm_head": "cpu"}
    made = load_fp8(folder, device_map=by_layer)
    assert torch.equal(made.logits(ids), plain.logits(ids))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_map": "fast"}, r"device_map 'fast' is not known; use auto, balanced, or a dict"),
        ({"device_map": "auto", "device": "cpu"}, r"device 'cpu' and device_map exclude"),
    ],
)
def test_options_that_do_not_go_together(
    folder: Path, options: dict[str, str], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        load_fp8(folder, **options)  # type: ignore[arg-type]


def test_a_gpu_that_is_not_there_is_named(folder: Path) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(UnsupportedError, match="cuda"):
        load_fp8(folder, device_map={"": "cpu", "model.layers.1": count})


class OneDevice(TorchDispatchMode):
    """Refuses ops whose tensors are on two devices, ours too, of which torch does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.device, torch.device]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204
        tensors = torch.utils._pytree.tree_leaves((args, kwargs))
        devices = {x.device for x in tensors if isinstance(x, Tensor) and x.dim() > 0}
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            (source,) = devices
            self.copies.append((source, result.device))
        else:
            assert len(devices) <= 1, f"{func} got tensors on {devices}"
        return result


SHAPE = replace(
    LLAMA_3_8B, vocab_size=64, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2,
    head_dim=16, max_context=256, windows=(None, 16, None), rotary=(0, 0, None),
)  # fmt: skip


@pytest.fixture
def fake() -> Iterator[OneDevice]:
    watch = OneDevice()
    with FakeTensorMode(allow_non_fake_inputs=True), watch:
        yield watch


class FakeWeights(RandomWeights):
    """Random weights without numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(CPU, torch.bfloat16, quantized=True)
        self.device = device

    def on(self, device: torch.device) -> FakeWeights:
        return FakeWeights(device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)


def fake_decoder(placed: Placement) -> Decoder:
    return random_decoder(SHAPE, FakeWeights(placed.embedding), True, placement=placed)


@pytest.mark.parametrize("tokens", [3, 20])
def test_nothing_is_combined_across_devices(fake: OneDevice, tokens: int) -> None:
    """Two sequences, 16-bit inputs and 8-bit ones: every op's tensors are on one device."""
    placed = Placement(GPUS[0], (GPUS[0], GPUS[1], GPUS[2]), GPUS[2], GPUS[3])
    decoder = fake_decoder(placed)
    cache = decoder.new_cache(2, 64)
    assert [blocks.device for blocks in cache.tensors()[::4]] == list(placed.layers)
    assert [scale.device for scale in cache.tensors()[2::4]] == list(placed.layers)
    step = CacheStep(
        sequences=(0, 1),
        new_lengths=(tokens - 1, 1),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slots=torch.zeros(tokens, dtype=torch.int64),
        block_tables=torch.zeros(2, 8, dtype=torch.int32),
        lengths=torch.zeros(2, dtype=torch.int32),
        query_starts=torch.zeros(3, dtype=torch.int32),
        last_rows=(tokens - 2, tokens - 1),
    )
    fake.copies.clear()
    hidden = decoder.run_step(torch.zeros(tokens, dtype=torch.int64), cache, step)
    assert hidden.device == decoder.device == GPUS[3]
    assert decoder.head(hidden).device == GPUS[3]
    ids = torch.zeros(2, tokens, dtype=torch.int64)
    assert decoder.logits(ids).device == GPUS[3]
    between = {(a, b) for a, b in fake.copies if a != b and CPU not in (a, b)}
    angles = {(GPUS[0], other) for other in GPUS[1:]}
    assert between == angles | {(GPUS[1], GPUS[2]), (GPUS[2], GPUS[3])}


def test_a_decoder_on_several_devices_records_nothing(fake: OneDevice) -> None:
    del fake
    for placed in (
        Placement(GPUS[0], (GPUS[0],) * 2 + (GPUS[1],), GPUS[1], GPUS[1]),
        Placement(CPU, (CPU, CPU, GPUS[0]), GPUS[0], GPUS[0]),
    ):
        decoder = fake_decoder(placed)
        assert decoder._graphs is None
        assert decoder._fused is None


def test_budgets_of_modules() -> None:
    assert budgets("auto", [100, 200], 100) == {0: 70, 1: 140}
    assert budgets("auto", [100, 100], 180) == {0: 100, 1: 100}
    assert budgets("balanced", [100, 300], 100) == {0: 27, 1: 82}


def test_modules_of_a_transformers_model(tmp_path: Path) -> None:
    """A family of transformers' own runs with a map, and names its parts as it likes."""
    made = checkpoints.build(
        tmp_path / "m", checkpoints.OTHERS["gpt-neox"](), checkpoints.SCHEMES["dynamic"], "none"
    )
    ids = tiny.random_ids(12).view(1, 12)
    expected = load_engine(made).logits(ids)
    assert torch.equal(load_engine(made, device_map={"": "cpu"}).logits(ids), expected)
    with pytest.raises(UnsupportedError, match="device_map: The device_map provided does not"):
        load_engine(made, device_map={"lm_head": "cpu"})


def test_a_module_is_where_its_longest_name_is() -> None:
    places = ModulePlaces({"": CPU, "h.1": GPUS[1], "h.1.mlp": GPUS[2]})
    assert places.device_of("h.1.mlp.weight") == GPUS[2]
    assert places.device_of("h.1.norm") == GPUS[1]
    assert places.device_of("h.10.norm") == CPU
