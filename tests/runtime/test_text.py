from __future__ import annotations

import random
from typing import Any

import pytest

from quantkit.runtime.text import Detokenizer, TextStream
from tests.runtime.tokenizers import BUILDERS, CORPUS, byte_fallback, byte_level


@pytest.fixture(scope="module", params=list(BUILDERS))
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return BUILDERS[request.param]()


def whole(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True)


def pieces_of(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def test_pieces_of_random_tokens_add_up_to_the_whole(tokenizer: Any) -> None:
    # Random ids reach what text does not: cut characters, lone bytes, specials anywhere.
    generator = random.Random(1)
    for _ in range(300):
        ids = [generator.randrange(len(tokenizer)) for _ in range(generator.randrange(1, 24))]
        assert "".join(pieces_of(tokenizer, ids)) == whole(tokenizer, ids), ids


@pytest.mark.parametrize("text", CORPUS)
def test_pieces_of_text_add_up_and_never_end_in_half_a_character(text: str) -> None:
    tokenizer = byte_level()
    pieces = pieces_of(tokenizer, tokenizer(text)["input_ids"])
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert max(map(len, pieces)) < 20  # it does stream


def test_a_character_of_several_tokens_appears_at_once() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a🙂b")["input_ids"]
    assert len(ids) == 5  # the emoji is three of them
    assert pieces_of(tokenizer, ids) == ["a", "", "", "🙂", "b", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    tokenizer = byte_level()
    ids = tokenizer("a🙂")["input_ids"][:-1]
    pieces = pieces_of(tokenizer, ids)
    assert pieces[:-1] == ["a", "", ""]
    assert "".join(pieces) == whole(tokenizer, ids)


def test_a_run_of_byte_tokens_is_held_until_it_ends() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁The", "<0xE2>", "<0x82>", "<0xAC>", "<0x0A>", "a"])
    assert pieces_of(tokenizer, ids) == ["The", "", "", "", "", "€\na", ""]
    # One bad byte more and the whole run decodes differently: nothing had been released.
    assert "".join(pieces_of(tokenizer, [*ids[:5], ids[1]])) == whole(tokenizer, [*ids[:5], ids[1]])


def test_special_tokens_leave_no_text(tokenizer: Any) -> None:
    special = tokenizer.convert_tokens_to_ids(["<tool>", "</s>", "<s>"])
    assert pieces_of(tokenizer, special) == ["", "", "", ""]


class TestStopStrings:
    def feed(self, stop: list[str], text: str, armed_after: int = 0) -> tuple[list[str], bool]:
        tokenizer = byte_level()
        stream = TextStream(tokenizer, tuple(stop))
        pieces = []
        for count, token in enumerate(tokenizer(text)["input_ids"], start=1):
            pieces.append(stream.push(token, armed=count > armed_after))
            if stream.stopped:
                break
        pieces.append(stream.finish())
        assert stream.text == "".join(pieces)
        return pieces, stream.stopped

    def test_the_text_ends_before_the_stop_string(self) -> None:
        pieces, stopped = self.feed(["END"], "one two END three")
        assert "".join(pieces) == "one two "
        assert stopped

    def test_a_possible_beginning_is_held_back_and_released_when_it_is_none(self) -> None:
        pieces, stopped = self.feed(["zzX"], "abzzcd zz")
        assert not stopped
        assert pieces[2:4] == ["", ""]
        assert pieces[4].startswith("zz")
        assert "".join(pieces) == "abzzcd zz"

    def test_the_earliest_of_several_counts(self) -> None:
        pieces, _ = self.feed(["three", "tw", "two"], "one two three")
        assert "".join(pieces) == "one "

    def test_a_stop_string_may_end_inside_a_token(self) -> None:
        pieces, stopped = self.feed(["his"], "The history of")
        assert ("".join(pieces), stopped) == ("The ", True)

    def test_a_stop_string_of_one_multibyte_character(self) -> None:
        pieces, stopped = self.feed(["🙂"], "ab🙂cd")
        assert ("".join(pieces), stopped) == ("ab", True)

    def test_text_before_it_is_armed_cannot_stop(self) -> None:
        pieces, stopped = self.feed(["z"], "zzyyz!", armed_after=2)
        assert ("".join(pieces), stopped) == ("zzyy", True)

    def test_a_held_byte_token_stops_at_once(self) -> None:
        tokenizer = byte_fallback()
        stream = TextStream(tokenizer, ("\n",))
        pieces = [stream.push(i) for i in tokenizer.convert_tokens_to_ids(["▁The", "<0x0A>"])]
        assert stream.stopped
        assert "".join(pieces) == stream.text == "The"
