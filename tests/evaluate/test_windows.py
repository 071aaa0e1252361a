from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quantkit.errors import DataError
from quantkit.evaluate.windows import Cutting

TEXT = list(range(100, 201))
PREFIXES = [(), (1,), (1, 2)]


def scored(cutting: Cutting, text: Sequence[int]) -> list[int]:
    """Return the positions that are scored, in order, after checking every window."""
    positions: list[int] = []
    for window in cutting.windows(text, 7):
        inputs, targets = window.inputs.tolist(), window.targets.tolist()
        assert 1 <= len(inputs) <= cutting.window
        assert len(targets) == len(inputs) - window.start
        assert window.text == 7
        length = len(cutting.prefix)
        assert tuple(inputs[:length]) == cutting.prefix
        end = window.position + len(targets)
        body = inputs[length:]
        assert body == list(text[end - 1 - len(body) : end - 1])
        assert targets == list(text[window.position : end])
        positions += range(window.position, end)
    return positions


@pytest.mark.parametrize("prefix", PREFIXES[:2])
@pytest.mark.parametrize("stride", [1, 8, 16, 31, 32])
def test_b43_every_token_but_the_first_is_scored_once(stride: int, prefix: tuple[int, ...]) -> None:
    cutting = Cutting(32, stride, prefix)
    positions = scored(cutting, TEXT)
    assert positions == list(range(0 if prefix else 1, 101))
    assert len(positions) == cutting.count(101) == (101 if prefix else 100)


@given(st.data())
def test_so_it_is_for_any_text_window_and_stride(data: st.DataObject) -> None:
    prefix = data.draw(st.sampled_from(PREFIXES))
    window = data.draw(st.integers(max(1, len(prefix)), 40))
    stride = data.draw(st.integers(1, window - max(len(prefix) - 1, 0)))
    text = TEXT[: data.draw(st.integers(2, 101))]
    cutting = Cutting(window, stride, prefix)
    positions = scored(cutting, text)
    assert positions == list(range(0 if prefix else 1, len(text)))
    assert len(positions) == cutting.count(len(text))
    assert len(list(cutting.windows(text))) == cutting.num_windows(len(text))


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_window_as_long_as_the_text_makes_the_stride_meaningless(prefix: tuple[int, ...]) -> None:
    for stride in (1, 50, 100):
        (window,) = Cutting(102, stride, prefix).windows(TEXT)
        assert window.inputs.tolist() == [*prefix, *TEXT[:-1]]


def test_a_token_has_the_rest_of_its_window_as_context() -> None:
    windows = list(Cutting(32, 8).windows(TEXT))
    assert [len(window.targets) for window in windows] == [32] + [8] * 8 + [4]
    assert [window.start for window in windows[1:]] == [24] * 9


@pytest.mark.parametrize("num_tokens", [0, 1])
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_text_without_anything_to_predict_is_an_error(
    num_tokens: int, prefix: tuple[int, ...]
) -> None:
    with pytest.raises(DataError, match=f"a text of {num_tokens} tokens"):
        list(Cutting(8, 7, prefix).windows(TEXT[:num_tokens]))
    assert len(list(Cutting(8, 7, prefix).windows(TEXT[:2]))) == 1


@pytest.mark.parametrize("stride", [0, -1, 33])
def test_a_stride_that_leaves_tokens_out_is_an_error(stride: int) -> None:
    with pytest.raises(
        DataError, match=f"--stride must be between 1 and the window, 32, got {stride}"
    ):
        Cutting(32, stride)


@pytest.mark.parametrize(("window", "prefix"), [(0, ()), (-5, ()), (1, (1, 2))])
def test_a_window_without_room_is_an_error(window: int, prefix: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="--window must be at least"):
        Cutting(window, 1, prefix)
