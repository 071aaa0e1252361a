"""Running a model layer by layer computes what the whole model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from quantkit.calibrate.batches import Batch, make_batches
from quantkit.calibrate.layerwise import LayerwiseModel
from quantkit.errors import UnsupportedError
from tests import tiny
from tests.calibrate import models

ModelOf = Callable[[str], Path]
RECURRENT = ["falcon-h1", "mamba"]


def two_rows(num_tokens: int = 20) -> Tensor:
    return torch.stack([tiny.random_ids(num_tokens, seed) for seed in (1, 2)])


@torch.no_grad()
def run_layers(model: LayerwiseModel, batches: list[Batch], repeats: int = 1) -> list[Tensor]:
    """Return each layer's output for the first batch; a layer runs `repeats` times."""
    outputs = []
    for number, name in enumerate(model.skeleton.layer_names):
        model.skeleton.load(name)
        for _ in range(repeats):
            results = [output for _, output in model.run(number, batches)]
        for batch, output in zip(batches, results, strict=True):
            batch.hidden = output
        model.skeleton.unload(name)
        outputs.append(results[0])
    return outputs


@pytest.mark.parametrize("kind", models.CONFIGS)
def test_every_layer_gives_the_hidden_states_of_the_whole_model(
    model_of: ModelOf, kind: str
) -> None:
    skeleton = models.open_skeleton(model_of(kind))
    model = LayerwiseModel(skeleton)
    expected, _ = models.run_whole(model_of(kind), skeleton.layer_names, two_rows())
    # Twice, as calibration does: nothing of the first run may be left in a cache.
    outputs = run_layers(model, model.prepare([two_rows()]), repeats=2)
    assert len(outputs) == len(expected) >= 2
    for number, (output, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(output, wanted), f"layer {number}"


@pytest.mark.parametrize("kind", ["llama", "gemma3", "bloom", *RECURRENT])
def test_batches_do_not_see_each_other(model_of: ModelOf, kind: str) -> None:
    first, second = two_rows().unsqueeze(1).unbind(0)
    model = LayerwiseModel(models.open_skeleton(model_of(kind)))
    alone = run_layers(model, model.prepare([first]))
    beside = run_layers(model, model.prepare([first, second, first[:, :7]]))
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))


class TestLargeMatrices:
    """bfloat16 kernels choose the order of their sums by the number of rows and threads."""

    @pytest.fixture(scope="class")
    @staticmethod
    def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
        sizes = {"hidden_size": 576, "intermediate_size": 1536, "max_position_embeddings": 128}
        heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
        config = transformers.LlamaConfig(**{**tiny.LLAMA, **sizes, **heads})
        return models.save(tmp_path_factory.mktemp("wide") / "model", config)

    @staticmethod
    def outputs(folder: Path, batches: list[Tensor]) -> Tensor:
        """Return what leaves the last layer, rows of all batches together."""
        model = LayerwiseModel(models.open_skeleton(folder))
        prepared = model.prepare(batches)
        run_layers(model, prepared)
        return torch.cat([batch.hidden for batch in prepared])

    rows = torch.stack([tiny.random_ids(96, seed) for seed in range(3)])

    def test_a_sequence_does_not_depend_on_the_size_of_its_batch(self, wide: Path) -> None:
        together, alone = self.outputs(wide, [self.rows]), self.outputs(wide, [*self.rows[:, None]])
        assert torch.equal(together, alone)

    def test_a_sequence_does_not_depend_on_the_number_of_threads(self, wide: Path) -> None:
        one = self.outputs(wide, [self.rows])
        torch.set_num_threads(2)
        assert torch.equal(self.outputs(wide, [self.rows]), one)

    def test_what_depends_on_them_is_rounding(self, wide: Path) -> None:
        together, alone = self.outputs(wide, [self.rows]), self.outputs(wide, [*self.rows[:, None]])
        # Two layers of some ten bfloat16 roundings of 2**-9 each.
        assert (together - alone).norm() <= 20 * 2**-9 * alone.norm()


def test_only_the_loaded_layer_is_in_memory(model_of: ModelOf) -> None:
    skeleton = models.open_skeleton(model_of("llama"))
    model = LayerwiseModel(skeleton)
    model.prepare([two_rows()])
    skeleton.unload(skeleton.layer_names[0])
    assert all(parameter.is_meta for parameter in skeleton.model.parameters())
    skeleton.load(skeleton.layer_names[1])
    loaded = [name for name, p in skeleton.model.named_parameters() if not p.is_meta]
    assert loaded
    assert all(name.startswith("model.layers.1.") for name in loaded)


def test_equal_masks_are_kept_once(model_of: ModelOf) -> None:
    model = LayerwiseModel(models.open_skeleton(model_of("llama")))
    batches = model.prepare([two_rows(), two_rows()])
    cos = [call.kwargs["position_embeddings"][0] for batch in batches for call in batch.calls]
    assert len({tensor.data_ptr() for tensor in cos}) == 1


class TestRefused:
    """Silently wrong hidden states would be the alternative."""

    def test_a_model_that_changes_hidden_states_between_layers(self, tmp_path: Path) -> None:
        config = transformers.XLMConfig(n_words=128, emb_dim=64, n_layers=2, n_heads=4)
        model = LayerwiseModel(models.open_skeleton(models.save(tmp_path, config)))
        with pytest.raises(UnsupportedError, match=r"XLMWithLMHeadModel changes hidden states"):
            model.prepare([two_rows()])

    def test_a_model_that_loops_over_its_layers(self, tmp_path: Path) -> None:
        config = transformers.HrmTextConfig(**{**tiny.LLAMA, "num_hidden_layers": 4})
        model = LayerwiseModel(models.open_skeleton(models.save(tmp_path, config)))
        with pytest.raises(UnsupportedError, match=r"HrmTextForCausalLM has .* layers and runs"):
            model.prepare([two_rows()])

    def test_a_model_with_a_cache_of_its_own(self, tmp_path: Path) -> None:
        config = transformers.MiniMaxConfig(
            **tiny.LLAMA, head_dim=16, num_local_experts=2, layer_types=["linear_attention"] * 2
        )
        model = LayerwiseModel(models.open_skeleton(models.save(tmp_path, config)))
        with pytest.raises(UnsupportedError, match=r"MiniMaxForCausalLM cannot be run"):
            model.prepare([two_rows()])


class TestBatches:
    lengths = (5, 9, 5, 5, 7, 9, 5)

    def samples(self) -> list[Tensor]:
        return [torch.full((n,), number) for number, n in enumerate(self.lengths)]

    @pytest.mark.parametrize("size", [1, 2, 3, 100])
    def test_hold_every_sample_once(self, size: int) -> None:
        rows = [row for batch in make_batches(self.samples(), size) for row in batch]
        assert sorted(int(row[0]) for row in rows) == list(range(len(self.lengths)))
        assert all(len(row) == self.lengths[int(row[0])] for row in rows)

    @pytest.mark.parametrize("size", [1, 2, 3, 100])
    def test_respect_the_size_and_start_with_one_of_the_longest(self, size: int) -> None:
        batches = make_batches(self.samples(), size)
        assert [int(token) for token in batches[0][0]] == [1] * 9
        assert len(batches[0]) == 1
        assert max(len(batch) for batch in batches) <= size

    def test_of_nothing_are_none(self) -> None:
        assert make_batches([], 4) == []
