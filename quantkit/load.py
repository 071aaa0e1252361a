"""`load_fp8`: a checkpoint and what drafts for it; the one place that joins the two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quantkit.runtime.loading import load_engine
from quantkit.runtime.model import Fp8Model
from quantkit.runtime.placement import DeviceMap
from quantkit.speculative.drafter import Drafter
from quantkit.speculative.loading import check_draft, load_drafter
from quantkit.speculative.speculation import Speculator, check_verification

DETERMINISTIC_WIDTH = 8
"""Rows of a decoding pass with `deterministic`: what most kernels run in the time of one or two."""


def load_fp8(
    path: str | Path,
    device: str = "auto",
    draft: str | Path | Drafter | None = None,
    kv: str = "auto",
    threads: int | None = None,
    dtype: str = "auto",
    activations: str = "auto",
    verification: str = "coupled",
    deterministic: bool = False,
    draft_texts: Sequence[str] = (),
    device_map: str | DeviceMap | None = None,
) -> Fp8Model:
    """Load a checkpoint that `calibrate` or `export` wrote, or another tool in FP8.

    Args:
        path: The checkpoint's folder. Formats: compressed-tensors, fp8, modelopt, and our own.
        device: "cpu", "cuda", or "auto": a GPU if there is one.
        draft: What drafts tokens: "suffix" looks for repetitions; "auto" also uses the drafter that
            `quantkit draft` left in the checkpoint; a path is a smaller checkpoint with the same
            tokenizer; None or "none" decodes plainly. A Drafter of your own will do, too.
        kv: "auto" caches keys and values as the checkpoint declares, "none" unquantized.
        threads: CPU threads; None leaves torch's setting.
        dtype: Dtype of the activations, or "auto": the checkpoint's own.
        activations: "auto" keeps them in `dtype`, "quantized" quantizes them as declared.
        verification: "coupled": drafts do not change the output at all. "rejection" and "block"
            accept more of them when sampling; then the output has the same distribution, and what
            a seed gives depends on the drafts.
        deterministic: Run decoding passes of one fixed size, so that not even roundings depend on
            drafts or on the batch.
        draft_texts: Texts that outputs may repeat, in which drafts are looked for too.
        device_map: Several GPUs, each with some of the layers, in place of `device`. "auto" takes
            as few as hold the weights and leave room for caches, "balanced" all; the layers are
            split by their bytes. A dict says it by name, as accelerate writes it:
            {"model.embed_tokens": 0, "model.layers": 0, "model.layers.30": 1, "model.norm": 1,
            "lm_head": 1}; the longest name counts, "" means all. Layers stay whole: tokens go
            through the GPUs one after the other, which makes room and not speed.

    Raises CheckpointError if the folder is no intact checkpoint, and UnsupportedError for an option
    that is not known or a draft that does not fit.
    """
    check_verification(verification)
    if isinstance(draft, (str, Path)):
        check_draft(draft)
    engine = load_engine(
        path,
        device=device,
        dtype=dtype,
        kv=kv,
        activations=activations,
        threads=threads,
        device_map=device_map,
    )
    model = Fp8Model(engine, Path(path), width=DETERMINISTIC_WIDTH if deterministic else None)
    drafter = load_drafter(draft, model, draft_texts) if isinstance(draft, (str, Path)) else draft
    if drafter is not None:
        model.speculator = Speculator(engine, drafter, verification, model.width)
    return model
