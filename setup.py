"""Metadata of quantkit, and its C++ extensions `quantkit/_cpu` and `_cuda` (sources in csrc/).

The extensions use the stable ABI of LibTorch only, so one binary serves every torch >= 2.10 and
every Python. They are optional: where one cannot be built, quantkit installs without it and runs on
its slow reference kernels. Build with `pip install --no-build-isolation -e .`, because isolation
hides the installed torch. `_cuda` is built where torch has CUDA, or where QUANTKIT_CUDA_ARCHS says
for which GPUs.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

TORCH_TARGET_VERSION = "0x020a000000000000"  # 2.10, the oldest release with all that csrc/ uses
SOURCES = ["csrc/bindings.cpp", *sorted(str(path) for path in Path("csrc/cpu").glob("*.cpp"))]
HEADERS = sorted(str(path) for path in Path("csrc").rglob("*.h"))


class BuildExtension(build_ext):
    """Compile against the installed torch, or explain why not and go on."""

    def build_extension(self, ext: Extension) -> None:
        try:
            root = torch_root()
            if ext.name == "quantkit._cuda":
                build_cuda(root, self.get_ext_fullpath(ext.name))
                return
            ext.include_dirs, ext.library_dirs = [str(root / "include")], [str(root / "lib")]
            super().build_extension(ext)
        except Exception as error:  # a missing torch, compiler or linker must not stop the install
            sys.stderr.write(
                f"\nquantkit: WARNING: {ext.name} was not built; quantkit will run on its slow"
                f" reference kernels.\nquantkit: reason: {error}\n"
                "quantkit: to build it, install torch >= 2.10 and a C++20 compiler (for _cuda also"
                " nvcc and the nvidia-cutlass wheel), then run"
                " pip install --no-build-isolation -e .\n\n"
            )


def torch_root() -> Path:
    """Return the folder of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed here (is pip using build isolation?)")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").exists():
        raise RuntimeError(f"torch at {root} has no stable ABI headers; torch >= 2.10 has")
    return root


def build_cuda(torch: Path, output: str) -> None:
    """Build the CUDA kernels, unless neither torch nor the user asks for them."""
    has_cuda = runpy.run_path(str(torch / "version.py"))["cuda"] is not None
    if has_cuda or os.environ.get("QUANTKIT_CUDA_ARCHS"):
        subprocess.run([sys.executable, "csrc/build_cuda.py", "--output", output], check=True)


cpu_extension = Extension(
    "quantkit._cpu",
    SOURCES,
    depends=HEADERS,
    define_macros=[("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)],
    libraries=["torch_cpu"],
    extra_compile_args=[
        "-std=c++20",
        "-O3",
        "-g0",
        "-fvisibility=hidden",
        # Products and sums are fused only where a kernel says so: results must not depend on how
        # the compiler blocked a loop.
        "-ffp-contract=off",
        "-Wall",
        "-Wno-maybe-uninitialized",  # false alarms inside GCC's own AVX-512 headers
        "-Wno-uninitialized",
    ],
    optional=True,  # an editable install then does not insist on a file to copy
    py_limited_api=True,  # it uses no Python API at all; this names it _cpu.abi3.so
)
cuda_extension = Extension("quantkit._cuda", [], optional=True, py_limited_api=True)

setup(
    name="quantkit",
    version="0.1.0",
    description="FP8 quantization of language models: calibrate, export, and run them fast",
    long_description=Path("README.md").read_text() if Path("README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    # calibrate/ sits at top level but is imported as quantkit.calibrate. The committed link
    # quantkit/calibrate makes the source tree import alike; the set drops its second mention.
    packages=sorted({*find_packages(include=["quantkit", "quantkit.*"]), "quantkit.calibrate"}),
    package_dir={"quantkit.calibrate": "calibrate"},
    package_data={
        "quantkit": ["py.typed", "*.pyi"],
        "quantkit.inspection": ["*.html"],
        "quantkit.evaluate": ["report.html"],
        "quantkit.calibrate": ["recipes/*.toml", "corpus/*.txt"],
    },
    ext_modules=[cpu_extension, cuda_extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    install_requires=[
        "torch>=2.10",
        "transformers>=5",
        "accelerate",
        "datasets",
        "greenlet",
        "safetensors",
        "huggingface_hub",
        "numpy",
        "typer>=0.29",
        "rich",
    ],
    extras_require={
        "gguf": ["gguf"],
        "eval": ["lm_eval>=0.4.13", "tenacity"],
        "report": ["matplotlib", "jinja2"],
        "dev": [
            "pytest",
            "pytest-xdist>=3.2",
            "hypothesis",
            "ruff",
            "mypy",
            "compressed-tensors",
            "types-greenlet",
            "ml_dtypes",
            "gguf",
            "psutil",
            "matplotlib",
            "jinja2",
            "lm_eval>=0.4.13",
            "tenacity",
        ],
    },
    entry_points={"console_scripts": ["quantkit=quantkit.cli.main:main"]},
)
