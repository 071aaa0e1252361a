from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit import SamplingParams
from quantkit.errors import CheckpointError, GenerationError
from quantkit.runtime.model import Fp8Model
from tests import tiny
from tests.runtime.fake_engine import FakeEngine
from tests.runtime.tokenizers import byte_level

CONFIG = {"model_type": "llama", "bos_token_id": tiny.BOS_ID, "eos_token_id": tiny.EOS_ID}
PROMPT = "hello world the cat"


def make_model(
    folder: Path,
    chat_template: str | None = tiny.CHAT_TEMPLATE,
    add_bos: bool = True,
    generation_config: dict[str, Any] | None = None,
    tokenizer: bool = True,
    **config: Any,
) -> Fp8Model:
    if tokenizer:
        tiny.save_tokenizer(folder, chat_template, add_bos)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return Fp8Model(FakeEngine(tiny.VOCAB_SIZE), folder)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Fp8Model:
    return make_model(tmp_path_factory.mktemp("model"))


def test_a_string_gives_a_string_and_a_list_a_list(model: Fp8Model) -> None:
    one = model.generate(PROMPT, max_new_tokens=6)
    assert isinstance(one, str)
    assert model.generate([PROMPT, "sun"], max_new_tokens=6)[0] == one
    assert model.generate([], max_new_tokens=6) == []


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 4}, {"stop": ["a", "e"]}])
def test_the_pieces_of_a_stream_add_up_to_the_text(
    model: Fp8Model, options: dict[str, Any]
) -> None:
    whole = model.generate(PROMPT, max_new_tokens=20, **options)
    assert "".join(model.stream(PROMPT, max_new_tokens=20, **options)) == whole
    ids = model.encode(PROMPT)
    assert model.generate_ids([ids], max_new_tokens=20, **options)[0].text == whole


def test_text_is_the_decoding_of_the_ids(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.save_pretrained(tmp_path)
    model = make_model(tmp_path, tokenizer=False, eos_token_id=None)
    model.engine = FakeEngine(len(tokenizer))
    for seed in range(20):
        (done,) = model.generate_ids([[70, 71]], temperature=1.5, seed=seed, max_new_tokens=40)
        assert done.text == tokenizer.decode(done.ids, skip_special_tokens=True)


def test_options_may_come_as_an_object_as_keywords_or_as_both(model: Fp8Model) -> None:
    params = SamplingParams(max_new_tokens=3, temperature=0.5, seed=1)
    ids = model.encode(PROMPT)
    base = model.generate_ids([ids], params)[0].ids
    assert model.generate_ids([ids], params, max_new_tokens=2)[0].ids == base[:2]
    with pytest.raises(GenerationError, match="unknown sampling option 'top_q'"):
        model.generate_ids([ids], top_q=1)


def test_stats_are_those_of_the_last_call(model: Fp8Model) -> None:
    model.generate([PROMPT, "sun"], max_new_tokens=4, ignore_eos=True)
    assert (model.stats.prompt_tokens, model.stats.new_tokens) == (7, 8)
    list(model.stream("sun", max_new_tokens=2, ignore_eos=True))
    assert (model.stats.prompt_tokens, model.stats.new_tokens) == (2, 2)


def test_generation_config_gives_the_defaults_and_every_eos_id(tmp_path: Path) -> None:
    # Greedy tokens of the fake engine are fixed, so any of them can be declared an end.
    free = make_model(tmp_path).generate_ids([[5, 6]], max_new_tokens=8, ignore_eos=True)[0].ids
    listed = {"eos_token_id": [127, free[3]], "max_new_tokens": 7}
    model = make_model(tmp_path, generation_config=listed)
    (done,) = model.generate_ids([[5, 6]])
    assert (done.ids, done.finish_reason) == (free[:4], "stop")
    assert len(model.generate_ids([[5, 6]], ignore_eos=True)[0].ids) == 7


def test_token_ids_missing_in_generation_config_come_from_config(tmp_path: Path) -> None:
    assert make_model(tmp_path, generation_config={}).generation_config["eos_token_id"] == 2
    nested = make_model(
        tmp_path, eos_token_id=None, text_config={"eos_token_id": [4, 5]}, generation_config={}
    )
    assert nested.generation_config["eos_token_id"] == [4, 5]


def test_a_broken_generation_config_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        model.generate_ids([[5]])


@pytest.mark.parametrize("template", [tiny.CHAT_TEMPLATE, tiny.CHAT_TEMPLATE.split("}}", 1)[1]])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_chat_begins_with_one_bos(tmp_path: Path, template: str, add_bos: bool) -> None:
    model = make_model(tmp_path, chat_template=template, add_bos=add_bos)
    ids = model.encode_chat([{"role": "user", "content": "hello cat"}])
    wanted = add_bos or template == tiny.CHAT_TEMPLATE
    assert ids.count(tiny.BOS_ID) == int(wanted)
    assert (ids[0] == tiny.BOS_ID) == wanted
    assert model.tokenizer.decode(ids).endswith("hello cat </s> assistant :")


def test_a_prompt_that_writes_bos_itself_has_one(model: Fp8Model) -> None:
    assert model.encode("<s> hello") == model.encode("hello")


def test_chat_without_a_template_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(GenerationError, match="has no chat template"):
        make_model(tmp_path, chat_template=None).encode_chat([{"role": "user", "content": "a"}])


def test_a_template_that_refuses_is_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path, chat_template="{{ raise_exception('system role not supported') }}")
    with pytest.raises(GenerationError, match="system role not supported"):
        model.encode_chat([{"role": "system", "content": "a"}])


def test_an_empty_prompt_starts_at_bos_or_is_an_error(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    assert model.generate_ids([[]], max_new_tokens=3)[0].ids == (
        model.generate_ids([[tiny.BOS_ID]], max_new_tokens=3)[0].ids
    )
    without = make_model(tmp_path, add_bos=False, bos_token_id=None)
    with pytest.raises(GenerationError, match="prompt 0 has no tokens"):
        without.generate("", max_new_tokens=3)


def test_a_checkpoint_without_tokenizer_still_takes_ids(tmp_path: Path) -> None:
    model = make_model(tmp_path, tokenizer=False)
    (done,) = model.generate_ids([[5, 6]], max_new_tokens=3)
    assert (len(done.ids), done.text) == (3, None)
    for use in (
        lambda: model.generate("a"),
        lambda: model.stream([5, 6]),
        lambda: model.generate_ids([[5]], stop="x"),
    ):
        with pytest.raises(CheckpointError, match="has no tokenizer"):
            use()


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot load the tokenizer of"):
        model.generate("a")


@pytest.mark.parametrize("prompts", [[5, 6], ["hello"], [[5, None]]])
def test_prompts_that_are_not_token_ids_are_refused(model: Fp8Model, prompts: Any) -> None:
    with pytest.raises(GenerationError, match="prompt 0 must be a sequence of token ids"):
        model.generate_ids(prompts)


def test_a_tensor_of_ids_is_taken_too(model: Fp8Model) -> None:
    from_list = model.generate_ids([[5, 6], [7, 8]], max_new_tokens=3)
    from_tensor = model.generate_ids(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=3)
    assert [c.ids for c in from_list] == [c.ids for c in from_tensor]


def test_errors_of_a_stream_come_at_once(model: Fp8Model) -> None:
    with pytest.raises(GenerationError, match="top_p"):
        model.stream("a", top_p=7)


def test_logits_take_a_batch_and_check_it(model: Fp8Model) -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    logits = model.logits(ids)
    assert (logits.shape, logits.dtype) == ((2, 3, tiny.VOCAB_SIZE), torch.float32)
    assert torch.equal(model.logits(ids.tolist()), logits)
    for bad in (ids[0], ids.float(), ids[:, :0], ids + 125, ids - 6):
        with pytest.raises(GenerationError, match="input_ids"):
            model.logits(bad)


def test_importing_quantkit_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, quantkit; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    for name in quantkit.__all__:
        assert getattr(quantkit, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'load_fp9'"):
        quantkit.load_fp9  # noqa: B018
