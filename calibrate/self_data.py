"""Calibration text that the model writes itself (`--data self`)."""

from __future__ import annotations

import torch
from torch import Tensor

from quantkit.calibrate.source import ModelSource
from quantkit.errors import DataError

SEQUENCES_AT_ONCE = 8


@torch.no_grad()
def generate_samples(
    source: ModelSource, num_samples: int, seq_len: int, seed: int
) -> list[Tensor]:
    """Sample `num_samples` sequences of up to `seq_len` tokens from the original model.

    Every sequence starts from the BOS token (or EOS where there is none) and is drawn at
    temperature 1; transformers generates, so any architecture works. Returns int64 [tokens] each.
    """
    model = source.load_model(torch.bfloat16)
    config = model.config.get_text_config()
    start = config.bos_token_id if config.bos_token_id is not None else config.eos_token_id
    start = start[0] if isinstance(start, list) else start
    if start is None:
        raise DataError(f"{source.name} has no BOS or EOS token to start from; give --data a file")
    samples: list[Tensor] = []
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        while len(samples) < num_samples:
            rows = min(SEQUENCES_AT_ONCE, num_samples - len(samples))
            prompt = torch.full((rows, 1), start)
            output = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=seq_len - 1,
                min_new_tokens=seq_len - 1,
                pad_token_id=start,
            )
            samples.extend(output.cpu().unbind(0))
    finally:
        torch.random.set_rng_state(generator_state)
    return samples
