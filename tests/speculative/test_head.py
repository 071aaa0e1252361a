"""The drafter head: what it computes, what it keeps, how it is stored, how it is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantkit.checkpoint import open_checkpoint
from quantkit.errors import CheckpointError, UnsupportedError
from quantkit.runtime.generation import Generation
from quantkit.runtime.loading import load_engine
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft
from quantkit.speculative.controller import Controller
from quantkit.speculative.drawing import draw_coupled
from quantkit.speculative.head_drafter import HeadDrafter, HeadRunner, HeadSession
from quantkit.speculative.head_model import HeadModel
from quantkit.speculative.head_weights import DraftHead, HeadShape, TargetEnds, is_head
from quantkit.speculative.hidden_tap import HiddenTap
from quantkit.speculative.hybrid import HybridDrafter, HybridSession
from quantkit.speculative.loading import load_drafter
from quantkit.speculative.speculation import Speculator
from quantkit.speculative.step_costs import StepCosts
from quantkit.speculative.suffix import SuffixDrafter
from tests import checkpoints, tiny
from tests.runtime.fake_engine import FakeEngine
from tests.speculative import toy
from tests.speculative.judges import FixedJudge
from tests.speculative.scripted import result, run
from tests.speculative.test_loop import SETTINGS, params

SHAPE = HeadShape(
    hidden_size=64, vocab_size=128, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96
)
PROMPTS = [tiny.random_ids(count, seed=count).tolist() for count in (9, 1, 5)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = checkpoints.build(tmp_path_factory.mktemp("target"), checkpoints.FAMILIES["llama"]())
    return tiny.save_tokenizer(path)


@pytest.fixture(scope="module")
def target(folder: Path) -> Any:
    return load_engine(folder, dtype="float32")


@pytest.fixture(scope="module")
def ends(folder: Path) -> TargetEnds:
    return TargetEnds.read(open_checkpoint(folder))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> DraftHead:
    """A random head, as it is read back: its matrices are exactly representable in 8 bits."""
    model = HeadModel(SHAPE, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += torch.randn(parameter.shape) * 0.1
    fresh = DraftHead(SHAPE, model.weights(), torch.arange(0, 128, 2), {"updates": 0})
    return DraftHead.load(fresh.save(tmp_path_factory.mktemp("head") / "draft"))


def model_of(head: DraftHead) -> HeadModel:
    model = HeadModel(SHAPE)
    model.load_state_dict(head.weights)
    return model


def request(prompt: Sequence[int], sequence: int = 0) -> Request:
    return Request(sequence, list(prompt), 10**6, toy.params(temperature=0), None)


def read(session: HeadSession, cache: Any, tokens: Sequence[int], sequence: int = 0) -> None:
    """Let the target read tokens through the session's tap."""
    ids = torch.tensor(list(tokens))
    session.engine.forward(ids, [sequence], [len(tokens)], cache)


def test_it_computes_what_was_trained(head: DraftHead, ends: TargetEnds, target: Any) -> None:
    length, steps = 12, 4
    known, ids = torch.randn(length, 64), tiny.random_ids(length)
    embedded = ends.embedding[ids]
    expected = model_of(head).unroll(known[None], embedded[None], steps)
    runner = HeadRunner(head, ends, target)
    for end in range(1, 10):
        cache = runner.new_cache(1)
        with torch.inference_mode():
            guess, _ = runner.run(known[:end], ids[:end], [0], [end], cache)
            assert torch.allclose(guess[0], expected[0][0, end - 1], atol=1e-4)
            for step in range(1, steps):
                place = end - 1 + step
                if place < length:
                    guess, _ = runner.run(guess, ids[place : place + 1], [0], [1], cache)
                    assert torch.allclose(guess[0], expected[step][0, place], atol=1e-4)


def test_logits_are_those_of_the_targets_head_for_tokens_it_can_draft(
    head: DraftHead, ends: TargetEnds, target: Any
) -> None:
    runner = HeadRunner(head, ends, target)
    known, ids = torch.randn(3, 64), tiny.random_ids(3)
    hidden, logits = runner.run(known, ids, [0, 1, 2], [1, 1, 1], runner.new_cache(3))
    expected = hidden @ ends.output.float().T
    # The output matrix is rounded to 8 bits: 2 ** -4 relative for each weight, half of it random.
    assert float((logits - expected[:, ::2]).abs().max()) < 0.1 * float(expected.std()) * 3
    wide = runner.vocabulary.widen(logits)
    assert torch.equal(wide[:, ::2], logits)
    assert bool((wide[:, 1::2] == -torch.inf).all())


def drafts_from_scratch(
    head: DraftHead, ends: TargetEnds, target: Any, tokens: Sequence[int], length: int
) -> list[int]:
    """What a head drafts that has seen nothing but the committed tokens."""
    session = HeadDrafter(head, ends, target).session(target, 1, draw_coupled(toy.params()))
    assert isinstance(session, HeadSession)
    one = request(tokens)
    one.params = toy.params(temperature=0)
    session._draw = draw_coupled(one.params)
    read(session, session.engine.new_cache(1, 64), tokens[:-1])
    (draft,) = session.propose([one], [length], FixedJudge())
    return list(draft.tokens)


def test_drafts_do_not_depend_on_what_was_refused_before(
    head: DraftHead, ends: TargetEnds, target: Any
) -> None:
    generator = torch.Generator().manual_seed(0)
    session = HeadDrafter(head, ends, target).session(
        target, 1, draw_coupled(toy.params(temperature=0))
    )
    assert isinstance(session, HeadSession)
    cache = session.engine.new_cache(1, 64)
    one = request(PROMPTS[0])
    read(session, cache, one.prompt)
    one.ids = [5]
    while one.length < 50:
        length, kept = torch.randint(0, 6, (2,), generator=generator).tolist()
        (draft,) = session.propose([one], [length], FixedJudge())
        committed = [*one.prompt, *one.ids]
        if length:
            expected = drafts_from_scratch(head, ends, target, committed, length)
            assert list(draft.tokens) == expected
        # The target reads the last token and the draft; some of it is accepted, one replaced.
        read(session, cache, [committed[-1], *draft.tokens])
        one.ids += [*draft.tokens[:kept], int(torch.randint(128, (1,), generator=generator))]
        cache.truncate(0, one.length - 1)


def test_a_batch_shares_passes(head: DraftHead, ends: TargetEnds, target: Any) -> None:
    params_ = toy.params(temperature=0)
    session = HeadDrafter(head, ends, target).session(target, 3, draw_coupled(params_))
    assert isinstance(session, HeadSession)
    cache, requests = session.engine.new_cache(3, 64), []
    for number, prompt in enumerate(PROMPTS):
        read(session, cache, prompt, number)
        requests.append(request(prompt, number))
        requests[-1].ids = [7]
    drafts = session.propose(requests, [4, 0, 2], FixedJudge())
    assert session.passes == 4
    assert drafts[1] == Draft()
    for number, length in ((0, 4), (2, 2)):
        expected = drafts_from_scratch(head, ends, target, [*PROMPTS[number], 7], length)
        assert list(drafts[number].tokens) == expected


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("hybrid", [False, True])
def test_b38_b42_a_head_changes_nothing(
    setting: str,
    hybrid: bool,
    head: DraftHead,
    ends: TargetEnds,
    target: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Controller, "pays", lambda *_: True)
    resolved = params(**SETTINGS[setting])
    drafter: Any = HeadDrafter(head, ends, target)
    if hybrid:
        drafter = HybridDrafter(SuffixDrafter(), drafter, "head")
    for verification, width in (("coupled", None), ("coupled", 4), ("rejection", 4)):
        speculator = Speculator(target, drafter, verification, width, StepCosts.nominal())
        speculation = speculator.start(resolved, len(PROMPTS))
        generation = Generation(target, PROMPTS, resolved, None, speculation, width)
        ours = generation.completions()
        assert speculation.stats.num_draft_tokens > 0
        if verification == "coupled" or resolved.temperature == 0:
            plain = run(target, PROMPTS, resolved, width=width)
            assert [c.ids for c in ours] == [c.ids for c in plain]
            if width is not None:
                assert result(ours) == result(plain)


def test_the_hybrid_asks_the_head_where_it_promises_more() -> None:
    class Costly:
        passes = 3
        engine = FakeEngine()

        def propose(
            self, requests: Sequence[Request], limits: Sequence[int], judge: FixedJudge
        ) -> list[Draft]:
            asked.append([one.sequence for one in requests])
            found = [Draft([9] * limit, [object()] * limit) for limit in limits]  # type: ignore[list-item]
            return found

        def finish(self, request: Request) -> None:
            asked.append([request.sequence])

    asked: list[list[int]] = []
    free = SuffixDrafter().session(FakeEngine(), 2, draw_coupled(toy.params()))
    session = HybridSession(free, Costly(), "head")  # type: ignore[arg-type]
    copying, new = request([1, 2, 3, 4, 1, 2, 3]), request([1, 2, 3], sequence=1)
    drafts = session.propose([copying, new], [6, 2], FixedJudge(prospects=3.0))
    assert asked == [[1]]
    assert [list(draft.tokens) for draft in drafts] == [[4, 1, 2, 3, 4, 1], [9, 9]]
    session.finish(copying)
    assert asked[-1] == [0]
    assert session.passes == 3


class TestTap:
    def tap(self, target: Any) -> tuple[HiddenTap, Any]:
        tap = HiddenTap(target, 2)
        return tap, tap.new_cache(2, 32)

    def states(self, target: Any, tokens: Sequence[int]) -> Tensor:
        cache = target.new_cache(1, 32)
        return target.hidden(torch.tensor(list(tokens)), [0], [len(tokens)], cache).clone()

    def test_logits_are_the_engines(self, target: Any) -> None:
        tap, cache = self.tap(target)
        ids, plain = torch.arange(7), target.new_cache(2, 32)
        for last_only in (True, False):
            ours = tap.forward(ids, [0, 1], [3, 4], cache, last_only)
            assert torch.equal(ours, target.forward(ids, [0, 1], [3, 4], plain, last_only))

    def test_what_was_rolled_back_is_replaced(self, target: Any) -> None:
        tap, cache = self.tap(target)
        for tokens in ([1, 2, 3], [4], [5, 6, 7, 8], [9]):
            if tokens == [9]:
                cache.truncate(0, 5)
            tap.forward(torch.tensor(tokens), [0], [len(tokens)], cache)
        assert torch.equal(tap.take(0, 4), self.states(target, [1, 2, 3, 4, 5, 9])[:4])
        tap.forward(torch.tensor([10]), [0], [1], cache)
        expected = self.states(target, [1, 2, 3, 4, 5, 9, 10])[4:]
        assert torch.equal(tap.take(0, 7), expected)
        assert len(tap.take(0, 7)) == 0

    def test_sequences_are_apart_and_can_be_dropped(self, target: Any) -> None:
        tap, cache = self.tap(target)
        tap.forward(torch.tensor([1, 2, 3, 4]), [1, 0], [3, 1], cache)
        assert torch.equal(tap.take(1, 3), self.states(target, [1, 2, 3]))
        tap.drop(0)
        cache.release(0)
        tap.forward(torch.tensor([5, 6]), [0], [2], cache)
        assert torch.equal(tap.take(0, 2), self.states(target, [5, 6]))

    def test_an_engine_that_shows_no_states_is_refused(self) -> None:
        with pytest.raises(UnsupportedError, match="FakeEngine does not give"):
            HiddenTap(FakeEngine(), 1)


def test_a_head_is_stored_in_8_bits_and_read_back(head: DraftHead, tmp_path: Path) -> None:
    path = head.save(tmp_path / "draft")
    again = DraftHead.load(path)
    assert again.shape == head.shape
    assert torch.equal(again.token_ids, head.token_ids)
    assert all(torch.equal(again.weights[name], head.weights[name]) for name in head.weights)
    assert is_head(path)
    assert not is_head(tmp_path)
    size = sum(tensor.numel() for tensor in head.weights.values())
    assert (path / "model.safetensors").stat().st_size < 1.5 * size
    head.save(path)  # replaces an earlier one


def test_a_head_of_other_sizes_is_refused(
    head: DraftHead, folder: Path, tmp_path: Path, target: Any
) -> None:
    path = head.save(tmp_path / "draft")
    content = json.loads((path / "quantkit.json").read_text())
    content["draft_head"]["shape"]["num_kv_heads"] = 4
    (path / "quantkit.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"qkv has shape \[128, 64\], expected \[192, 64\]"):
        DraftHead.load(path)
    other = TargetEnds(torch.zeros(100, 64), torch.zeros(100, 64))
    with pytest.raises(CheckpointError, match="for 128 tokens and hidden size 64, the target has"):
        HeadDrafter(head, other, target)


def test_auto_finds_the_head_in_the_checkpoint(
    head: DraftHead, folder: Path, target: Any, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(folder, path)
    model = Fp8Model(target, path)
    assert isinstance(load_drafter("auto", model), SuffixDrafter)
    head.save(path / "draft")
    assert isinstance(load_drafter("auto", model), HybridDrafter)
    assert isinstance(load_drafter(path / "draft", model), HeadDrafter)
    open_checkpoint(path)  # a folder inside does not disturb it
