from __future__ import annotations

import random

import pytest

from quantkit.speculative.suffix_automaton import START, SuffixAutomaton


def text(count: int, letters: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(letters), k=count)


def ends_before(tokens: list[int], part: list[int]) -> list[int]:
    """Places after the occurrences of `part`, without the one at the very end."""
    size = len(part)
    return [at + size for at in range(len(tokens) - size) if tokens[at : at + size] == part]


@pytest.mark.parametrize("letters", [1, 2, 4, 30])
@pytest.mark.parametrize("seed", range(5))
def test_the_match_is_the_longest_end_that_occurred_before(letters: int, seed: int) -> None:
    automaton, tokens = SuffixAutomaton(), []
    for token in text(120, letters, seed):
        automaton.append(token)
        tokens.append(token)
        length = automaton.match_length
        assert automaton.tokens == tokens
        if length:
            assert automaton.match_end in ends_before(tokens, tokens[-length:])
        assert not ends_before(tokens, tokens[-length - 1 :]) or length + 1 > len(tokens)


def test_the_latest_occurrence_is_known_for_a_match_that_comes_back() -> None:
    tokens = [1, 2, 9, 1, 2, 8, 1, 2, 7, 1, 2]
    automaton = SuffixAutomaton(tokens)
    assert (automaton.match_length, automaton.match_end) == (2, 8)


@pytest.mark.parametrize("letters", [2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_a_cursor_follows_the_longest_match_of_another_text(letters: int, seed: int) -> None:
    stored = text(150, letters, seed)
    automaton, cursor, read = SuffixAutomaton(stored), START, []
    for token in text(80, letters, seed + 100):
        read.append(token)
        cursor = automaton.advance(cursor, token)
        length = cursor[1]
        if length:
            end = automaton.end_of(cursor)
            assert stored[end - length : end] == read[-length:]
        longer = read[-length - 1 :]
        assert len(longer) == length or not ends_before([*stored, -1], longer)


def test_a_token_that_never_occurred_starts_again() -> None:
    automaton = SuffixAutomaton([1, 2, 3])
    cursor = automaton.advance(automaton.advance(START, 1), 2)
    assert cursor[1] == 2
    assert automaton.advance(cursor, 9) == START


def test_states_stay_within_twice_the_length() -> None:
    for letters in (1, 2, 50):
        automaton = SuffixAutomaton(text(2000, letters, 0))
        assert len(automaton._next) <= 4000
