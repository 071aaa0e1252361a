"""Rules on shapes: what engines divide, by blocks and by GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from quantkit.lint.documents import whole_number
from quantkit.lint.engines import COMPRESSED_TENSORS, FP8, SERVERS, SGLANG, TRANSFORMERS, VLLM
from quantkit.lint.finding import Finding, error
from quantkit.lint.linears import COLUMN_PARALLEL, ROW_PARALLEL, Linear
from quantkit.lint.quantization import is_text
from quantkit.lint.subject import Subject

FEWER = "serve it on another number of GPUs"
WHOLE_EXPERTS = f"{FEWER}, or with expert parallelism, which cuts no expert"
BLOCK_SERVERS = (VLLM, SGLANG)
INPUT_GROUP = 128
PER_CHANNEL = "use scales per channel for this model"


def heads(subject: Subject) -> Iterator[Finding]:
    """vLLM: config/model.py, verify_with_parallel_config, and linear.py, QKVParallelLinear.

    SGLang: linear.py, QKVParallelLinear. KV heads are cut where there are enough, else copied.
    """
    gpus, config = subject.tensor_parallel, subject.folder.text_config
    queries = whole_number(config.get("num_attention_heads")) or 0
    shared = whole_number(config.get("num_key_value_heads")) or queries
    if queries % gpus:
        problem = f"is {queries}, not divisible by --tp {gpus}"
        yield error("tp-heads", SERVERS, "config.json: num_attention_heads", problem, FEWER)
    elif shared and (shared % gpus if gpus < shared else gpus % shared):
        problem = f"is {shared}: neither divides --tp {gpus} nor is divided by it"
        yield error("tp-kv-heads", SERVERS, "config.json: num_key_value_heads", problem, FEWER)


def divisible(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: linear.py, divide asserts for the cut side of every linear."""
    gpus = subject.tensor_parallel
    for linear in subject.linears.by_name.values():
        if linear.is_head or not is_text(linear.module):
            continue  # the vocabulary is padded, and vision is often not cut
        if linear.leaf in ("k_proj", "v_proj", "qkv_proj"):
            continue  # see `heads`
        size, side = _cut_side(linear)
        if size % gpus:
            problem = f"has {size} {side}, not divisible by --tp {gpus}"
            yield error("tp-size", SERVERS, linear.weight.name, problem, FEWER)


def _cut_side(linear: Linear) -> tuple[int, str]:
    if linear.leaf in COLUMN_PARALLEL:
        return linear.rows, "rows"
    if linear.leaf in ROW_PARALLEL:
        return linear.columns, "columns"
    return 0, ""


def shard_rows(subject: Subject, linear: Linear) -> int:
    """Return how many rows of a column-parallel linear one GPU holds."""
    gpus, config = subject.tensor_parallel, subject.folder.text_config
    kv_heads = whole_number(config.get("num_key_value_heads"))
    kv_heads = kv_heads or whole_number(config.get("num_attention_heads"))
    if linear.leaf in ("k_proj", "v_proj") and kv_heads:
        return linear.rows // kv_heads * max(1, kv_heads // gpus)
    return linear.rows // gpus


def block_rows(subject: Subject) -> Iterator[Finding]:
    """Blocks of scales must not be cut.

    vLLM: fp8_utils.py, validate_fp8_block_shape, for experts validate_fp8_block_shape_moe; SGLang:
    fp8_utils.py, the same. The last of several fused linears may end in part of a block unless
    GPUs share it, not so in SGLang's fp8.py, validate_block_quant_shapes.
    """
    for linears in _column_groups(subject):
        for linear in linears:
            block = linear.group.block if linear.group else None
            rows = shard_rows(subject, linear)
            if block is None or not linear.is_coded or rows % block[0] == 0:
                continue
            engines = _row_engines(subject, linears, linear)
            if engines:
                shard = (
                    f" on each of {subject.tensor_parallel} GPUs"
                    if subject.tensor_parallel > 1
                    else ""
                )
                fused = f", fused with {_others(linears, linear)}" if len(linears) > 1 else ""
                problem = f"has {rows} rows{shard}{fused}: not a multiple of the block's {block[0]}"
                advice = _advice(linear) if shard else PER_CHANNEL
                yield error("block-rows", engines, linear.weight.name, problem, advice)


def _row_engines(subject: Subject, linears: list[Linear], linear: Linear) -> tuple[str, ...]:
    engines = subject.loaders(*BLOCK_SERVERS)
    if subject.tensor_parallel > 1 or _is_expert(linear):
        return engines
    if len(linears) == 1:
        return ()
    if linear is linears[-1]:
        is_strict = subject.quantization.method == FP8
        return tuple(e for e in engines if is_strict and e == SGLANG)
    return engines


def _advice(linear: Linear) -> str:
    return WHOLE_EXPERTS if _is_expert(linear) else FEWER


def _is_expert(linear: Linear) -> bool:
    return ".experts." in linear.module


def _others(linears: list[Linear], linear: Linear) -> str:
    return ", ".join(other.leaf for other in linears if other is not linear)


def _column_groups(subject: Subject) -> Iterator[list[Linear]]:
    """Yield column-parallel linears, those that are fused together."""
    fused = list(subject.linears.fused())
    yield from fused
    known = {linear.module for linears in fused for linear in linears}
    for module, linear in subject.linears.by_name.items():
        if module not in known and linear.leaf in COLUMN_PARALLEL:
            yield [linear]


def block_columns(subject: Subject) -> Iterator[Finding]:
    """Inputs are quantized in groups of 128, on each GPU by itself.

    vLLM: fp8_utils.py, per_token_group_quant_fp8 asserts, and validate_fp8_block_shape for cut
    inputs; SGLang: fp8_kernel.py, per_token_group_quant_fp8.
    """
    gpus = subject.tensor_parallel
    for linear in subject.linears.coded:
        if linear.group is None or linear.group.strategy != "block":
            continue
        columns = linear.columns // gpus if linear.leaf in ROW_PARALLEL else linear.columns
        wide = linear.group.block[1] if linear.group.block else INPUT_GROUP
        if columns % wide == 0:
            continue
        shard = f" on each of {gpus} GPUs" if columns != linear.columns else ""
        problem = f"has {columns} columns{shard}: not a multiple of the inputs' groups of {wide}"
        is_cut = bool(shard) and linear.columns % wide == 0
        advice = _advice(linear) if is_cut else PER_CHANNEL
        engines = subject.loaders(*BLOCK_SERVERS)
        yield error("block-columns", engines, linear.weight.name, problem, advice)


def partial_blocks(subject: Subject) -> Iterator[Finding]:
    """Sizes over numbers of blocks are taken for the size of one, and inputs cut into whole groups.

    transformers: integrations/finegrained_fp8.py, Fp8Dequantize takes rows / scale rows for the
    rows of a block (on a CPU, and where a GPU has no FP8), and refuses what leaves a rest.
    compressed-tensors: quantization/lifecycle/forward.py unflattens inputs into whole groups.
    """
    method = subject.quantization.method
    for linear in subject.linears.coded if TRANSFORMERS in subject.loaders() else ():
        block = linear.group.block if linear.group else None
        if block is None:
            continue
        if method == FP8 and (problem := _misread(linear.rows, linear.columns, block)):
            yield error("partial-blocks", (TRANSFORMERS,), linear.weight.name, problem, PER_CHANNEL)
        elif method == COMPRESSED_TENSORS and linear.columns % block[1]:
            problem = f"has {linear.columns} columns, which it cuts into groups of {block[1]}"
            advice = f"load it with run_compressed=False, or {PER_CHANNEL}"
            yield error("partial-blocks", (TRANSFORMERS,), linear.weight.name, problem, advice)


def _misread(rows: int, columns: int, block: tuple[int, int]) -> str | None:
    for size, side, step in ((rows, "rows", block[0]), (columns, "columns", block[1])):
        count = ceil(size / step)
        if size % count:
            return f"has {size} {side} in {count} blocks, which it cannot divide"
        if count > 1 and size // count != step:
            taken = size // count
            return f"has {size} {side} in blocks of {step}: it takes them for blocks of {taken}"
    return None


def alignment(subject: Subject) -> Iterator[Finding]:
    """SGLang: fp8_utils.py, apply_fp8_linear calls torch._scaled_mm for scales per tensor.

    torch wants both sides of the matrix to be multiples of 16 there. vLLM pads (cutlass.py), and
    other granularities have kernels for any size.
    """
    if subject.quantization.method != COMPRESSED_TENSORS:
        return
    for linears in _one_by_one_or_fused(subject):
        first = linears[0]
        if not first.is_coded or first.group is None or first.group.strategy != "tensor":
            continue
        columns = first.columns // (subject.tensor_parallel if first.leaf in ROW_PARALLEL else 1)
        rows = sum(
            shard_rows(subject, linear) if linear.leaf in COLUMN_PARALLEL else linear.rows
            for linear in linears
        )
        if rows % 16 or columns % 16:
            problem = f"is {rows} x {columns} on a GPU, fused: both must be multiples of 16"
            advice = "use scales per channel"
            yield error("alignment", (SGLANG,), first.weight.name, problem, advice)


def _one_by_one_or_fused(subject: Subject) -> Iterator[list[Linear]]:
    fused = list(subject.linears.fused())
    yield from fused
    known = {linear.module for linears in fused for linear in linears}
    yield from ([line] for name, line in subject.linears.by_name.items() if name not in known)


RULES = (heads, divisible, block_rows, block_columns, partial_blocks, alignment)
