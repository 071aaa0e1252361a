"""csrc/build_cuda.py without nvcc: what it plans, when it compiles again, what it says.

The tests of how the library finds symbols use g++ alone; tests/cuda/check_binaries.py holds what
needs compiled kernels, and its own logic is tested here too.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections import Counter
from pathlib import Path

import build_cuda
import pytest
from build_cuda import BuildError, Tools, Unit
from ptxas_log import Kernel, parse_ptxas, read_log, summary

from quantkit import extension
from tests.cuda import check_binaries
from tests.cuda.check_binaries import Code, Reviewed, Rule

TREE = {
    "bindings.cpp": '#include "ops.h"\n',
    "ops.h": "",
    "rows.cu": '#include "rows.cuh"\n#include <torch/x.h>\n',
    "rows.cuh": '  #  include "../types.h"\n',
    "mm_sm90a.cu": '#include "mm.cuh"\n',
    "mm_sm89.cu": '#include "mm.cuh"\n',
    "mm.cuh": '#include "cutlass/cutlass.h"\n#include "mm.cuh"\n',
}


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "csrc" / "cuda"
    folder.mkdir(parents=True)
    for name, text in TREE.items():
        (folder / name).write_text(text)
    (folder.parent / "types.h").write_text("")
    return folder


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    monkeypatch.setattr(Tools, "nvcc_version", "nvcc 13.0")
    monkeypatch.setattr(build_cuda.importlib.metadata, "version", lambda _: "1")
    return Tools(Path("nvcc"), Path("torch"), Path("cutlass"))


def named(units: list[Unit], name: str) -> Unit:
    return next(unit for unit in units if unit.source.name == name)


@pytest.mark.parametrize(
    ("text", "archs"),
    [
        ("", build_cuda.ARCHS),
        ("90a", ("90a",)),
        ("80, 90a", ("80", "90a")),
        ("8.0;9.0a;12.0a", ("80", "90a", "120a")),
        ("80 80", ("80",)),
    ],
)
def test_architectures_are_parsed(text: str, archs: tuple[str, ...]) -> None:
    assert build_cuda.requested_archs(text) == archs


@pytest.mark.parametrize("text", ["sm_90a", "hopper", "90A", "9", "9.0+PTX"])
def test_an_unknown_architecture_is_an_error(text: str) -> None:
    with pytest.raises(BuildError, match="QUANTKIT_CUDA_ARCHS must be like 80,89,90a"):
        build_cuda.requested_archs(text)


def test_a_suffix_binds_a_file_to_its_architecture(sources: Path) -> None:
    units = build_cuda.plan(sources, ("80", "90a"))
    assert {unit.source.name: unit.archs for unit in units} == {
        "bindings.cpp": (),
        "rows.cu": ("80", "90a"),
        "mm_sm90a.cu": ("90a",),
    }
    assert units[0].source.name == "mm_sm90a.cu"  # the longest first


def test_the_real_tree_names_only_default_architectures() -> None:
    folder = build_cuda.ROOT / "csrc" / "cuda"
    only = {build_cuda.only_arch(source) for source in folder.glob("*.cu")}
    assert only <= {None, *build_cuda.ARCHS}
    planned = {unit.source.name for unit in build_cuda.plan(folder, build_cuda.ARCHS)}
    assert planned == {path.name for path in folder.glob("*.c*") if path.suffix != ".cuh"}


def test_included_files_are_followed(sources: Path) -> None:
    names = [path.name for path in build_cuda.included_files(sources / "rows.cu")]
    assert names == ["rows.cu", "rows.cuh", "types.h"]
    units = build_cuda.plan(sources, build_cuda.ARCHS)
    assert {unit.source.name for unit in units if unit.uses_cutlass} == {
        "mm_sm90a.cu",
        "mm_sm89.cu",
    }


def test_commands(sources: Path, tools: Tools) -> None:
    units = build_cuda.plan(sources, build_cuda.ARCHS)
    rows = " ".join(build_cuda.compile_command(named(units, "rows.cu"), tools))
    assert "arch=compute_80,code=sm_80 " in rows
    assert "arch=compute_89,code=[sm_89,compute_89]" in rows  # runs on what is yet to come
    assert "arch=compute_90a,code=sm_90a " in rows
    assert "-DQK_HAS_SM89 -DQK_HAS_SM90A" in rows
    assert "-fmad=false" in rows
    assert "cutlass" not in rows
    assert "fast" not in rows
    product = " ".join(build_cuda.compile_command(named(units, "mm_sm90a.cu"), tools))
    assert product.count("-gencode") == 1
    assert "-isystem cutlass/include" in product
    assert "-fmad" not in product


def test_an_object_is_compiled_again_when_anything_that_went_into_it_changes(
    sources: Path, tools: Tools, monkeypatch: pytest.MonkeyPatch
) -> None:
    def path(name: str = "rows.cu", archs: tuple[str, ...] = ("80",)) -> Path:
        return build_cuda.object_path(Unit(sources / name, archs), tools, Path("objects"))

    first, other = path(), path("bindings.cpp", ())
    assert path() == first
    assert path(archs=("80", "90a")) != first
    (sources.parent / "types.h").write_text("// found through rows.cuh")
    second = path()
    assert second != first
    assert path("bindings.cpp", ()) == other
    monkeypatch.setattr(build_cuda, "FLAGS", (*build_cuda.FLAGS, "-lineinfo"))
    assert path() != second
    product = path("mm_sm90a.cu", ("90a",))
    versions = {"torch": "1", "nvidia-cutlass": "4.3"}
    monkeypatch.setattr(build_cuda.importlib.metadata, "version", versions.get)
    assert path("bindings.cpp", ()) != other  # the flags
    other = path("bindings.cpp", ())
    assert path("mm_sm90a.cu", ("90a",)) != product
    monkeypatch.setattr(Tools, "nvcc_version", "nvcc 13.1")
    assert path("bindings.cpp", ()) != other


def test_what_is_missing_is_named(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_cuda.shutil, "which", lambda *_, **__: None)
    with pytest.raises(BuildError, match="nvcc was not found; install the CUDA toolkit"):
        build_cuda.find_nvcc()
    monkeypatch.setattr(build_cuda.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match=r"pip install --no-deps 'nvidia-cutlass==4\.2\.\*'"):
        build_cuda.find_tools(build_cuda.plan(sources, ("90a",)))
    with pytest.raises(BuildError, match="torch is not installed here"):
        build_cuda.find_torch()


def test_cuda_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("home", "path"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "nvcc").touch(mode=0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", str(tmp_path / "path" / "bin"))
    assert build_cuda.find_nvcc() == tmp_path / "home" / "bin" / "nvcc"
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    assert build_cuda.find_nvcc() == tmp_path / "path" / "bin" / "nvcc"


def fake_nvcc(folder: Path, script: str) -> Path:
    path = folder / "nvcc"
    path.write_text(f"#!{sys.executable}\nimport sys\nargs = sys.argv[1:]\n{script}")
    path.chmod(0o755)
    return path


def test_what_compiled_is_kept_and_what_did_not_is_told(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(Tools, "nvcc_version", "nvcc 13.0")
    monkeypatch.setattr(build_cuda.importlib.metadata, "version", lambda _: "1")
    script = (
        "if 'rows.cu' in ' '.join(args) and 'broken' in open(args[-3]).read():\n"
        "    sys.exit('ptxas info : noise\\nrows.cu(1): error')\n"
        f"print({PTXAS!r})\n"
        "open(args[-1], 'w')"
    )
    tools = Tools(fake_nvcc(tmp_path, script), tmp_path, tmp_path)
    units = build_cuda.plan(sources, ("80", "90a"))
    (sources / "rows.cu").write_text("broken")
    with pytest.raises(BuildError, match=r"rows.cu does not compile\n.*\nrows.cu\(1\): error$"):
        build_cuda.compile_all(units, tools, tmp_path / "objects")
    (sources / "rows.cu").write_text("")
    units = build_cuda.plan(sources, ("80", "90a"))
    objects = build_cuda.compile_all(units, tools, tmp_path / "objects")
    assert "3 files, 1 to compile\ncuda: [1/1] rows.cu" in capsys.readouterr().out
    assert all(path.exists() for path in objects.values())
    rows = named(units, "rows.cu")
    assert read_log(objects[rows])[1] == KERNELS
    table = summary([(rows.source, rows.archs, objects[rows])])
    assert [line.split()[-3:] for line in table.splitlines()[1:]] == [
        ["1", "8", "0"],
        ["1", "168", "24"],
    ]


PTXAS = """ptxas info    : 28 bytes gmem, 224 bytes cmem[4]
ptxas info    : Compiling entry function '_Z3onev' for 'sm_80'
ptxas info    : Function properties for _Z3onev
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 376 bytes cmem[0]
ptxas info    : Compile time = 3.332 ms
ptxas info    : Compiling entry function '_ZN1a3twoILi3EEEvv' for 'sm_90a'
ptxas info    : Function properties for _ZN1a3twoILi3EEEvv
    32 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 32 bytes cumulative stack size, 1024 bytes smem
"""
KERNELS = [
    Kernel("_Z3onev", "80", registers=8, shared=0, stack=0, spills=0),
    Kernel("_ZN1a3twoILi3EEEvv", "90a", registers=168, shared=1024, stack=32, spills=24),
]


def test_the_compilers_log_is_parsed() -> None:
    assert parse_ptxas(PTXAS) == KERNELS


SASS = """
Fatbin elf code:
================
arch = sm_90a
		Function : _ZN8quantkit4cuda5twiceIfEEvPKT_PS2_l
        /*0000*/                   LDC R1, c[0x0][0x28] ;    /* 0x00000a00ff017624 */
                                                             /* 0x000fe400078e00ff */
        /*0070*/               @P0 EXIT ;                    /* 0x000000000000094d */
        /*0080*/              @!UP0 UTMASTG.2D [UR4], [UR6] ;
        /*0090*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00a0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
		Function : _Z5emptyv
        /*0000*/                   BPT.TRAP 0x1 ;
"""


def test_the_disassembly_is_parsed() -> None:
    counts = Counter({"LDC": 1, "EXIT": 1, "UTMASTG.2D": 1, "STG.E.128": 2})
    assert check_binaries.parse_sass(SASS.splitlines()) == [
        ("90a", "_ZN8quantkit4cuda5twiceIfEEvPKT_PS2_l", counts),
        ("90a", "_Z5emptyv", Counter({"BPT.TRAP": 1})),
    ]


def test_kernels_have_short_names() -> None:
    assert check_binaries.short_name("_ZN8quantkit4cuda5twiceIfEEvPKT_PS2_l") == "twice"
    assert check_binaries.short_name("_Z5emptyv") == "empty"


def code(counts: dict[str, int], spills: int = 0, stack: int = 0, arch: str = "90a") -> Code:
    kernel = Kernel("_Z4multv", arch, registers=32, shared=0, stack=stack, spills=spills)
    return Code("mm_sm90a", kernel, Counter(counts))


RULES = (
    Rule("*", "", check_binaries.STORE),
    Rule("*", "", check_binaries.DOUBLE, wanted=False),
    Rule("mm_*", "mult", r"QGMMA.*E4M3", first_arch=90),
    Rule("mm_*", "another", "HMMA"),
    Rule("rows", "", "HMMA"),
)
GOOD = {"STG.E": 1, "QGMMA.64x16x32.F32.E4M3.E4M3": 4}


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        (code(GOOD), []),
        (code({"STG.E": 1}), ["no QGMMA"]),
        (code({"STG.E": 1}, arch="89"), []),
        (code({"BPT.TRAP": 1, "QGMMA.E4M3": 1}), [r"no (ST|"]),
        (code({"STS.128": 1, "STL": 1, "QGMMA.E4M3": 1}), [r"no (ST|"]),
        (code(GOOD | {"DFMA": 1}), ["has (D(ADD"]),
        (code(GOOD | {"F2F.F64.F32": 1}), ["has (D(ADD"]),
        (code(GOOD | {"PREEXIT": 1}), ["does not wait for the previous"]),
        (code(GOOD | {"PREEXIT": 1, "ACQBULK": 1}), []),
        (code(GOOD, spills=25, stack=32), ["spills: 25 bytes, reviewed were 24"]),
        (code(GOOD, stack=40), ["stack: 40 bytes, reviewed were 32"]),
        (code(GOOD, spills=24, stack=32), []),
    ],
)
def test_what_is_wrong_with_a_kernel_is_found(kernel: Code, expected: list[str]) -> None:
    reviewed = (Reviewed("mm_*", stack=32, spills=24, reason="seen"), Reviewed("x", 99, 99, ""))
    problems = list(check_binaries.problems_of(kernel, RULES, reviewed))
    assert len(problems) == len(expected)
    assert all(text in problem for text, problem in zip(expected, problems, strict=True))


def compile_shared(folder: Path, name: str, text: str, *options: str) -> Path:
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text(text)
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(library), *options]
    subprocess.run(command, check=True)
    return library


def test_the_library_finds_the_libtorch_cuda_of_the_process(tmp_path: Path) -> None:
    """Linked against the stub, it finds symbols of a library that nothing made global."""
    name = build_cuda.LIBTORCH_CUDA[0]
    for folder in ("stub", "real"):
        (tmp_path / folder).mkdir()
        body = f'extern "C" int {name}() {{ return {int(folder == "real")}; }}'
        compile_shared(tmp_path / folder, "libtorch_cuda", body, "-Wl,-soname,libtorch_cuda.so")
    use = f'extern "C" int {name}(); extern "C" int use() {{ return {name}(); }}'
    link = ["-ltorch_cuda", "-Wl,--no-undefined"]
    ours = compile_shared(tmp_path, "ours", use, f"-L{tmp_path}/stub", *link)
    rpath = f"-Wl,-rpath,{tmp_path}/real"
    torchs = compile_shared(tmp_path, "torchs", use, f"-L{tmp_path}/real", *link, rpath)
    with pytest.raises(OSError, match=r"libtorch_cuda\.so"):
        ctypes.CDLL(str(ours))
    ctypes.CDLL(str(torchs))  # as `import torch` loads it, its names kept to itself
    assert ctypes.CDLL(str(ours)).use() == 1


def test_symbols_that_torch_does_not_promise_are_found(tmp_path: Path) -> None:
    text = 'extern "C" int aoti_torch_x(); int strange(); int use() { return aoti_torch_x() + %s; }'
    good = compile_shared(tmp_path, "good", text % "0")
    bad = compile_shared(tmp_path, "bad", text % "strange()")
    assert check_binaries.library_problems(good) == []
    (problem,) = check_binaries.library_problems(bad)
    assert "bad.so needs _Z7strangev" in problem


def test_the_cuda_kernels_are_loaded_once_and_only_where_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTKIT_DISABLE_EXT", raising=False)
    loaded: list[str] = []
    monkeypatch.setattr(extension.torch.ops, "load_library", loaded.append)
    (tmp_path / "_cpu.abi3.so").touch()
    assert not extension.load_cuda_kernels(tmp_path)
    folder = tmp_path / "built"
    folder.mkdir()
    (folder / "_cuda.abi3.so").touch()
    assert extension.load_cuda_kernels(folder)
    assert extension.load_cuda_kernels(folder)
    assert loaded == [str(folder / "_cuda.abi3.so")]
    assert not caplog.records


def test_a_cuda_library_that_does_not_load_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("QUANTKIT_DISABLE_EXT", raising=False)
    (tmp_path / "_cuda.abi3.so").write_bytes(b"not a library")
    assert not extension.load_cuda_kernels(tmp_path)
    assert not extension.load_cuda_kernels(tmp_path)
    (record,) = caplog.records
    assert "using slow reference kernels" in record.message
    assert "file too short" in record.message


def test_disabled_cuda_kernels_are_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANTKIT_DISABLE_EXT", "1")
    (tmp_path / "_cuda.abi3.so").write_bytes(b"not a library")
    assert not extension.load_cuda_kernels(tmp_path)


def test_importing_makes_no_cuda_call() -> None:
    script = (
        "import torch\n"
        "def no(*a, **k): raise SystemExit('a CUDA call')\n"
        "torch._C._cuda_init = torch.cuda.is_available = torch.cuda._lazy_init = no\n"
        "from quantkit import attention_ops, dense_ops, ops, extension\n"
        "import quantkit.runtime.model\n"
        "print(extension.load_cuda_kernels.cache_info().currsize)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=build_cuda.ROOT, capture_output=True, text=True
    )
    assert result.stdout == "0\n", result.stderr
