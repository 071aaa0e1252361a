"""What vLLM makes of a checkpoint, as JSON: run by the Python that has vLLM.

    python vllm_tokens.py QUESTION.json ANSWER.json

The question: folder, kv (vLLM's kv_cache_dtype), prompts (lists of token ids) and a passage (one
such list). The answer: eight greedy tokens for each prompt, the log p of each token of the passage
but the first, and vLLM's version. Imports nothing of quantkit, so that the two need not be
installed together.

vLLM multiplies FP8 on a CPU with torch._scaled_mm, which takes minutes for each token there, and
its CPU build lacks the op that rounds fused weights with one scale per tensor anew. Both are
computed here in torch instead; loading, scales, rounding of inputs, attention and sampling are
vLLM's own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

NEW_TOKENS = 8


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **_: Any,
) -> torch.Tensor:
    """Compute what torch._scaled_mm computes, in float32."""
    product = (a.float() @ b.float()) * scale_a.float() * scale_b.float()
    result = product.to(out_dtype or a.dtype)
    return result if bias is None else result + bias


def scaled_fp8_quant(
    input: torch.Tensor, scale: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round with a scale that is given, as the op of that name does."""
    return (input.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale


def main(question_file: str, answer_file: str) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # one process, so that it has scaled_mm
    torch._scaled_mm = scaled_mm  # type: ignore[assignment]
    import vllm
    from vllm import LLM, SamplingParams, _custom_ops

    _custom_ops.scaled_fp8_quant = scaled_fp8_quant
    question = json.loads(Path(question_file).read_text())
    model = LLM(
        model=question["folder"],
        kv_cache_dtype=question["kv"],
        dtype="bfloat16",
        max_model_len=512,
        enforce_eager=True,
        seed=0,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    inputs = [{"prompt_token_ids": ids} for ids in question["prompts"]]
    tokens = [list(result.outputs[0].token_ids) for result in model.generate(inputs, greedy)]
    passage = question["passage"]
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    [result] = model.generate([{"prompt_token_ids": passage}], scored)
    pairs = zip(passage[1:], result.prompt_logprobs[1:], strict=True)
    answer = {
        "version": vllm.__version__,
        "tokens": tokens,
        "log_p": [found[token].logprob for token, found in pairs],
    }
    Path(answer_file).write_text(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
