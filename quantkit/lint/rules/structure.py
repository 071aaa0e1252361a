"""Rules on the files of weights: there, complete, and as the index says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from quantkit.lint.documents import mapping
from quantkit.lint.engines import ENGINES, SGLANG, TRANSFORMERS, VLLM
from quantkit.lint.finding import Finding, error, note, warning
from quantkit.lint.subject import Subject
from quantkit.shards import INDEX_NAME, SINGLE_NAME

AGAIN = "download or export the checkpoint again"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
NOT_WEIGHTS = ("training_args.bin", "optimizer", "scheduler", "scaler", "rng_state")


def weights_missing(subject: Subject) -> Iterator[Finding]:
    """No engine starts without weights (vLLM: default_loader.py, _prepare_weights)."""
    folder = subject.folder
    if not folder.shards and not folder.weight_map:
        yield error("no-weights", ENGINES, str(folder.path), "has no safetensors file", AGAIN)


def index_unreadable(subject: Subject) -> Iterator[Finding]:
    """Every loader reads weight_map when there is an index."""
    folder = subject.folder
    if INDEX_NAME in folder.unreadable:
        yield error("index", ENGINES, INDEX_NAME, folder.unreadable[INDEX_NAME], AGAIN)
    elif folder.has_index and not mapping(folder.documents[INDEX_NAME].get("weight_map")):
        yield error("index", ENGINES, INDEX_NAME, "has no weight_map", AGAIN)
    for name, file in folder.outside.items():
        problem = f"is mapped to {file!r}, which is no file name"
        yield error("index-outside-folder", ENGINES, name, problem[:200], AGAIN)


def shard_missing(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: weight_utils.py, filter_duplicate_safetensors_files raises."""
    folder = subject.folder
    for file in sorted(set(folder.weight_map.values()) - set(folder.shards)):
        yield error("shard-missing", ENGINES, file, f"is in {INDEX_NAME} and not there", AGAIN)


def shard_unreadable(subject: Subject) -> Iterator[Finding]:
    """The safetensors library opens no file whose header and size disagree."""
    for file, header in subject.folder.shards.items():
        if header.problem:
            yield error("shard-damaged", ENGINES, file, header.problem[:300], AGAIN)


def index_and_shards_differ(subject: Subject) -> Iterator[Finding]:
    """Every tensor is in exactly one shard, and in that which the index names."""
    folder = subject.folder
    whole = {file for file, header in folder.shards.items() if not header.problem}
    for name, file in folder.weight_map.items():
        if name not in folder.tensors and file in whole:
            problem = f"is in {file} by {INDEX_NAME}, and in no shard"
            yield error("tensor-missing", ENGINES, name, problem, AGAIN)
        elif name in folder.tensors and file in whole and folder.file_of[name] != file:
            problem = f"is in {folder.file_of[name]}, not in {file} as {INDEX_NAME} says"
            yield warning("index-wrong-shard", ENGINES, name, problem, "write the index again")
    for name, first, second in folder.twice:
        problem = f"is in both {first} and {second}; the one read last wins"
        yield error("tensor-twice", ENGINES, name, problem, "remove one and write the index again")
    if folder.weight_map:
        for name in folder.tensors.keys() - folder.weight_map.keys():
            problem = f"is in {folder.file_of[name]} and not in {INDEX_NAME}"
            yield warning("tensor-not-indexed", ENGINES, name, problem, "write the index again")


def total_size(subject: Subject) -> Iterator[Finding]:
    """Tools plan memory by it; no engine refuses another number."""
    folder = subject.folder
    declared = mapping(folder.documents.get(INDEX_NAME, {}).get("metadata")).get("total_size")
    actual = sum(entry.nbytes for entry in folder.tensors.values())
    is_whole = not any(header.problem for header in folder.shards.values())
    if declared is not None and declared != actual and is_whole:
        problem = f"is {declared!r}, and the tensors have {actual} bytes"
        yield note("total-size", ENGINES, f"{INDEX_NAME}: total_size", problem, "correct it")


def stray_shards(subject: Subject) -> Iterator[Finding]:
    """In vLLM and SGLang: weight_utils.py, filter_duplicate_safetensors_files.

    With an index both open its files only; without one, every *.safetensors of the folder.
    """
    folder = subject.folder
    for file in sorted(folder.files):
        if not file.endswith(".safetensors") or file in folder.shards:
            continue
        if file in folder.weight_map.values() or file.startswith("consolidated"):
            continue
        if folder.has_index:
            problem = f"is in no entry of {INDEX_NAME}; no engine opens it"
            yield note("stray-shard", ENGINES, file, problem, "remove it, or index it")
        else:
            problem = f"is read after {SINGLE_NAME} too: there is no index"
            advice = "move it to a folder of its own, or write an index"
            yield error("stray-shard", (VLLM, SGLANG), file, problem, advice)


def shard_name(subject: Subject) -> Iterator[Finding]:
    """transformers: modeling_utils.py looks for model.safetensors or the index, nothing else."""
    folder = subject.folder
    has_index = INDEX_NAME in folder.files
    if folder.shards and not has_index and SINGLE_NAME not in folder.shards:
        advice = f"rename it to {SINGLE_NAME}, or write {INDEX_NAME}"
        problem = f"is found by no loader that looks for {SINGLE_NAME}"
        yield error("shard-name", (TRANSFORMERS,), next(iter(folder.shards)), problem, advice)


def consolidated(subject: Subject) -> Iterator[Finding]:
    """vLLM: default_loader.py, _prepare_weights takes Mistral's own files where there are any."""
    for file in sorted(subject.folder.files):
        if file.startswith("consolidated") and file.endswith(".safetensors"):
            problem = "makes vLLM read it instead of the quantized shards"
            yield error("consolidated-weights", (VLLM,), file, problem, "remove it")


def pickles(subject: Subject) -> Iterator[Finding]:
    """vLLM, SGLang and transformers prefer safetensors; other tools may not, and a pickle is code.

    vLLM: default_loader.py, _prepare_weights.
    """
    for file in sorted(subject.folder.files):
        if Path(file).suffix in PICKLES and not file.startswith(NOT_WEIGHTS):
            problem = "are weights as a pickle beside safetensors: a second copy, and code"
            yield warning("pickled-weights", ENGINES, file, problem, "remove it")


def metadata_format(subject: Subject) -> Iterator[Finding]:
    """In transformers 4, modeling_utils.py, load_state_dict refuses a file without; 5 does not."""
    for file, header in subject.folder.shards.items():
        if not header.problem and header.metadata.get("format") != "pt":
            problem = f"has format {header.metadata.get('format')!r} in its metadata, not 'pt'"
            yield warning(
                "metadata-format",
                (TRANSFORMERS,),
                file,
                f"{problem}: transformers 4 refuses the file",
                "save it with metadata={'format': 'pt'}",
            )


RULES = (
    weights_missing,
    index_unreadable,
    shard_missing,
    shard_unreadable,
    index_and_shards_differ,
    total_size,
    stray_shards,
    shard_name,
    consolidated,
    pickles,
    metadata_format,
)
