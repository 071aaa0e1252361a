from __future__ import annotations

from collections.abc import Sequence

import pytest

from quantkit.runtime.request import Request
from quantkit.runtime.verification import Draft
from quantkit.speculative.drawing import draw_coupled
from quantkit.speculative.suffix import LONG_MATCH, SuffixDrafter, repeat
from tests.runtime.fake_engine import FakeEngine
from tests.speculative import toy
from tests.speculative.judges import FixedJudge


@pytest.fixture(autouse=True)
def _two_tokens_per_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts then say where a draft ends."""
    monkeypatch.setattr("quantkit.speculative.suffix.TOKENS_PER_MATCH", 2)


def request(prompt: Sequence[int], ids: Sequence[int] = (), sequence: int = 0) -> Request:
    return Request(sequence, list(prompt), 10**6, toy.params(), None, list(ids))


def session(drafter: SuffixDrafter):  # type: ignore[no-untyped-def] # noqa: ANN201
    return drafter.session(FakeEngine(), 8, draw_coupled(toy.params()))


def propose(drafter: SuffixDrafter, one: Request, limit: int = 15) -> Draft:
    (draft,) = session(drafter).propose([one], [limit], FixedJudge())
    return draft


def test_the_continuation_of_the_longest_match_is_drafted() -> None:
    draft = propose(SuffixDrafter(), request([5, 1, 2, 3, 7, 8, 9, 6, 2, 4, 4, 1, 2], [3]))
    # [1, 2, 3] came before: twice as many tokens as match.
    assert draft.tokens == [7, 8, 9, 6, 2, 4]
    assert {(guess.source, guess.feature) for guess in draft.guesses} == {("own", 3)}
    priors = [guess.prior for guess in draft.guesses]
    assert priors == sorted(priors)


@pytest.mark.parametrize("limit", [0, 1, 4])
def test_a_limit_is_kept(limit: int) -> None:
    prompt = [1, 2, 3, 7, 8, 9, 1, 2, 3]
    assert len(propose(SuffixDrafter(), request(prompt), limit)) == limit


def test_nothing_is_drafted_where_nothing_matches() -> None:
    assert propose(SuffixDrafter(), request([1, 2, 3, 4])).tokens == ()


def test_a_period_goes_on_beyond_the_end() -> None:
    draft = propose(SuffixDrafter(), request([1, 2, 3] * 4))
    assert draft.tokens == [1, 2, 3] * 5
    assert repeat([9, 1, 2], 1, 5) == [1, 2, 1, 2, 1]


def test_what_is_committed_between_calls_is_taken_in() -> None:
    one = request([1, 2, 3, 4, 5])
    drafting = session(SuffixDrafter())
    assert drafting.propose([one], [9], FixedJudge())[0].tokens == ()
    one.ids += [2]
    assert drafting.propose([one], [9], FixedJudge())[0].tokens == [3, 4]
    one.ids += [3, 4]
    assert drafting.propose([one], [9], FixedJudge())[0].tokens == [5, 2, 3, 4, 5, 2]


def test_sequences_do_not_mix() -> None:
    first, second = request([1, 2, 3, 1], sequence=0), request([1, 9, 8, 1], sequence=1)
    drafts = session(SuffixDrafter()).propose([first, second], [9, 9], FixedJudge())
    assert [draft.tokens for draft in drafts] == [[2, 3], [9, 8]]


def test_earlier_outputs_are_remembered_across_generations() -> None:
    drafter = SuffixDrafter()
    drafting, one = session(drafter), request([1, 2], [50, 51, 52, 53])
    drafting.propose([one], [9], FixedJudge())
    one.finish_reason = "length"
    drafting.finish(one)
    draft = propose(drafter, request([7, 8], [50, 51]))
    assert (draft.tokens, draft.guesses[0].source) == ([52, 53], "earlier")
    # What was only in the prompt is no output.
    assert propose(drafter, request([7, 1])).tokens == ()


def test_a_corpus_is_searched_and_its_texts_are_not_joined() -> None:
    drafter = SuffixDrafter([[1, 2, 3, 4], [5, 6, 7]])
    draft = propose(drafter, request([9, 2, 3]))
    assert (draft.tokens, draft.guesses[0].source) == ([4], "corpus")
    assert propose(drafter, request([9, 4])).tokens == []


def test_the_own_text_wins_a_tie_and_a_longer_match_wins() -> None:
    drafter = SuffixDrafter([[1, 2, 70, 71]])
    assert propose(drafter, request([2, 80, 81, 2])).guesses[0].source == "own"
    longer = propose(drafter, request([2, 80, 81, 1, 2]))
    assert (longer.tokens, longer.guesses[0].source) == ([70, 71], "corpus")


def test_the_store_is_bounded_and_keeps_the_newest() -> None:
    drafter = SuffixDrafter(earlier_tokens=100)
    for number in range(40):
        drafting, one = session(drafter), request([1], [1000 * number + n for n in range(10)])
        drafting.propose([one], [9], FixedJudge())
        drafting.finish(one)
    assert len(drafter._earlier.automaton.tokens) <= 111
    newest = propose(drafter, request([7], [39_003, 39_004]))
    assert newest.tokens == [39_005, 39_006, 39_007, 39_008]
    assert propose(drafter, request([7], [3, 4])).tokens == ()


def test_a_store_that_is_rebuilt_is_found_again_by_running_sequences() -> None:
    drafter = SuffixDrafter(earlier_tokens=40)
    running, one = session(drafter), request([7], [100, 101])
    running.propose([one], [9], FixedJudge())
    for start in (0, 20, 100):
        other = request([1], [*range(start, start + 15)])
        drafting = session(drafter)
        drafting.propose([other], [9], FixedJudge())
        drafting.finish(other)
    one.ids += [102]
    (draft,) = running.propose([one], [9], FixedJudge())
    assert draft.tokens == [103, 104, 105, 106, 107, 108]


def test_long_matches_are_counted_together() -> None:
    draft = propose(SuffixDrafter(), request([*range(40), *range(30)]))
    assert draft.guesses[0].feature == LONG_MATCH
