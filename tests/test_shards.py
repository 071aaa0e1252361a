"""Reading and writing folders of safetensors shards, intact and damaged."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from quantkit.errors import CheckpointError
from quantkit.shards import INDEX_NAME, SINGLE_NAME, ShardReader, ShardWriter, read_json, write_json

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64]


def some_tensors() -> dict[str, Tensor]:
    tensors = {f"layers.{i}.weight": torch.randn(8, 16).to(dtype) for i, dtype in enumerate(DTYPES)}
    return tensors | {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 3)}


def write(folder: Path, tensors: dict[str, Tensor], max_shard_bytes: int = 10**9) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    writer = ShardWriter(folder, max_shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    return writer.finish()


def raw(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(reader: ShardReader, tensors: dict[str, Tensor]) -> None:
    assert reader.names == sorted(tensors)
    for name, tensor in tensors.items():
        read = reader.tensor(name)
        assert (read.dtype, read.shape) == (tensor.dtype, tensor.shape)
        assert raw(read) == raw(tensor)
        assert reader.shape(name) == tuple(tensor.shape)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder of several shards with an index."""
    write(tmp_path / "sharded", some_tensors(), max_shard_bytes=300)
    return tmp_path / "sharded"


def test_one_file_without_index_if_all_fits(tmp_path: Path) -> None:
    tensors = some_tensors()
    total = write(tmp_path, tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == [SINGLE_NAME]
    assert total == sum(tensor.nbytes for tensor in tensors.values())
    assert_same(ShardReader(tmp_path), tensors)


def test_several_files_and_an_index_that_covers_every_tensor_once(sharded: Path) -> None:
    torch.manual_seed(0)
    tensors = some_tensors()
    reader = ShardReader(sharded)
    assert_same(reader, tensors)
    assert len(reader.files) > 1
    count = len(reader.files)
    assert reader.files == [
        f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)
    ]
    index = json.loads((sharded / INDEX_NAME).read_text())
    assert sorted(index["weight_map"]) == sorted(tensors)
    assert index["metadata"] == {"total_size": sum(t.nbytes for t in tensors.values())}
    assert {reader.file_of(name) for name in tensors} == set(reader.files)


def test_shards_respect_the_limit_and_larger_tensors_stand_alone(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.zeros(size) for i, size in enumerate([10, 10, 100, 5, 5])}
    write(tmp_path, tensors, max_shard_bytes=100)
    reader = ShardReader(tmp_path)
    contents = [[n for n in tensors if reader.file_of(n) == file] for file in reader.files]
    assert contents == [["t0", "t1"], ["t2"], ["t3", "t4"]]


def test_header_says_that_torch_wrote_it(tmp_path: Path) -> None:
    write(tmp_path, some_tensors())
    with safe_open(tmp_path / SINGLE_NAME, framework="pt") as handle:
        assert handle.metadata() == {"format": "pt"}


def test_views_and_tensors_that_share_memory_are_written_as_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "a": base.t(),
        "b": base[1:],
        "c": base,
        "d": base[:, ::2],
        "e": base[:1].expand(3, 4),
    }
    write(tmp_path, tensors)
    assert_same(ShardReader(tmp_path), tensors)


def test_a_tensor_changed_after_adding_is_written_as_it_was(tmp_path: Path) -> None:
    tensor = torch.ones(4)
    writer = ShardWriter(tmp_path)
    writer.add("t", tensor)
    tensor.zero_()
    writer.finish()
    assert torch.equal(ShardReader(tmp_path).tensor("t"), torch.ones(4))


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300], ids=["one", "many"])
def test_same_tensors_same_bytes(tmp_path: Path, max_shard_bytes: int) -> None:
    tensors = some_tensors()
    for run in ("a", "b"):
        write(tmp_path / run, tensors, max_shard_bytes)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002], ids=oct)
def test_modes_follow_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "out", some_tensors(), max_shard_bytes=300)
    finally:
        os.umask(before)
    for path in (tmp_path / "out").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask, path.name


def test_no_file_a_loader_would_open_before_finish(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, max_shard_bytes=300)
    for name, tensor in some_tensors().items():
        writer.add(name, tensor)
    assert not list(tmp_path.glob("*.safetensors"))
    assert list(tmp_path.glob("*.incomplete"))


def test_reading_a_tensor_that_is_not_there_names_it(sharded: Path) -> None:
    reader = ShardReader(sharded)
    assert "nothing" not in reader
    for read in (reader.tensor, reader.shape, reader.dtype):
        with pytest.raises(CheckpointError, match="no tensor nothing"):
            read("nothing")


def test_an_empty_folder_names_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
        ShardReader(tmp_path)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(CheckpointError, match=rf"{victim.name} is missing"):
        ShardReader(sharded)


@pytest.mark.parametrize("keep", [0, 4, 8, 60, -1], ids=["empty", "4", "8", "in header", "1 less"])
def test_a_truncated_shard_is_named_with_its_size(sharded: Path, keep: int) -> None:
    victim = sorted(sharded.glob("model-*.safetensors"))[0]
    content = victim.read_bytes()
    victim.write_bytes(content[:keep])
    size = len(content[:keep])
    with pytest.raises(CheckpointError, match=rf"{victim.name} \({size} bytes\) is truncated"):
        ShardReader(sharded)


def edit_index(folder: Path, **changes: str | None) -> None:
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    for name, file in changes.items():
        if file is None:
            del index["weight_map"][name]
        else:
            index["weight_map"][name] = file
    path.write_text(json.dumps(index))


def test_an_index_that_names_an_absent_tensor_is_refused(sharded: Path) -> None:
    file = ShardReader(sharded).files[0]
    edit_index(sharded, ghost=file)
    with pytest.raises(CheckpointError, match=f"tensor ghost is in {file}"):
        ShardReader(sharded)


def test_an_index_that_names_the_wrong_shard_is_refused(sharded: Path) -> None:
    reader = ShardReader(sharded)
    wrong = next(file for file in reader.files if file != reader.file_of("scalar"))
    edit_index(sharded, scalar=wrong)
    with pytest.raises(CheckpointError, match="tensor scalar"):
        ShardReader(sharded)


def test_a_tensor_the_index_forgot_is_refused(sharded: Path) -> None:
    edit_index(sharded, scalar=None)
    with pytest.raises(CheckpointError, match=r"tensor scalar of .* is not in the index"):
        ShardReader(sharded)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, second = ShardReader(sharded).files[:2]
    (sharded / second).write_bytes((sharded / first).read_bytes())
    with pytest.raises(CheckpointError, match=f"in both {first} and {second}"):
        ShardReader(sharded)


@pytest.mark.parametrize("file", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_an_index_that_points_outside_the_folder_is_refused(sharded: Path, file: str) -> None:
    edit_index(sharded, scalar=file)
    with pytest.raises(CheckpointError, match="outside the folder"):
        ShardReader(sharded)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}'],
)
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        ShardReader(sharded)


def test_json_keeps_the_order_of_keys_and_ends_with_a_newline(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"z": 1, "a": "ü"})
    assert path.read_text(encoding="utf-8") == '{\n  "z": 1,\n  "a": "ü"\n}\n'
    assert read_json(path) == {"z": 1, "a": "ü"}


def test_a_failing_disk_is_one_error_with_path_and_bytes(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk; Python ignores SIGXFSZ, so writing gives EFBIG."""
    script = """
        import resource, sys, torch
        from pathlib import Path
        from quantkit.errors import CheckpointError
        from quantkit.shards import ShardWriter
        from quantkit.staging import StagedFolder
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            with StagedFolder(Path(sys.argv[1])) as stage:
                writer = ShardWriter(stage.path)
                writer.add("t", torch.zeros(1_000_000))
                writer.finish()
                stage.commit()
        except CheckpointError as error:
            print(error)
    """
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(out)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "cannot write" in result.stdout
    assert "4000000 bytes" in result.stdout
    assert "too large" in result.stdout.lower()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("max_shard_bytes", [10**9, 300], ids=["one", "many"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_flushing_does_not_change_the_bytes(
    tmp_path: Path, max_shard_bytes: int, every: int
) -> None:
    tensors = some_tensors()
    write(tmp_path / "a", tensors, max_shard_bytes)
    (tmp_path / "b").mkdir()
    writer = ShardWriter(tmp_path / "b", max_shard_bytes)
    for number, (name, tensor) in enumerate(tensors.items()):
        writer.add(name, tensor)
        if number % every == 0:
            writer.flush()
    writer.finish()
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "b").iterdir())
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


@pytest.mark.parametrize("links", [True, False])
def test_another_writer_goes_on_from_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    tensors = some_tensors()
    write(tmp_path / "a", tensors, 300)
    for name in ("b", "work"):
        (tmp_path / name).mkdir()
    first = ShardWriter(tmp_path / "b", 300, work=tmp_path / "work")
    items = list(tensors.items())
    for name, tensor in items[:3]:
        first.add(name, tensor)
    pieces = first.flush()
    first.add("lost", torch.zeros(3))
    first.flush()  # and never recorded
    second = ShardWriter(tmp_path / "b", 300, tmp_path / "work", pieces)
    for name, tensor in items[3:]:
        second.add(name, tensor)
    if not links:
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(1, "no links")))
    second.finish()
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_missing_piece_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"piece-00000\.incomplete is missing"):
        ShardWriter(tmp_path, num_pieces=1)


def test_a_dtype_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.add("z", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(CheckpointError, match=r"tensor z is torch\.complex64"):
        writer.finish()
