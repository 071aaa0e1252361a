"""Metadata of quantkit, and its C++ extension `quantkit/_cpu` (sources in csrc/).

The extension uses the stable ABI of LibTorch only, so one binary serves every torch >= 2.10 and
every Python. It is optional: where it cannot be built, quantkit installs without it and runs on
its slow reference kernels. Build with `pip install --no-build-isolation -e .`, because isolation
hides the installed torch.
"""

from __future__ import annotations

import importlib.util
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
            ext.include_dirs, ext.library_dirs = torch_dirs()
            super().build_extension(ext)
        except Exception as error:  # a missing torch, compiler or linker must not stop the install
            sys.stderr.write(
                "\nquantkit: WARNING: the C++ kernels were not built; quantkit will run on its slow"
                f" reference kernels.\nquantkit: reason: {error}\n"
                "quantkit: to build them, install torch >= 2.10 and a C++20 compiler, then run"
                " pip install --no-build-isolation -e .\n\n"
            )


def torch_dirs() -> tuple[list[str], list[str]]:
    """Return the include and library folders of the installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise RuntimeError("torch is not installed here (is pip using build isolation?)")
    root = Path(spec.origin).parent
    if not (root / "include/torch/csrc/stable/library.h").exists():
        raise RuntimeError(f"torch at {root} has no stable ABI headers; torch >= 2.10 has")
    return [str(root / "include")], [str(root / "lib")]


extension = Extension(
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
        "quantkit.inspection": ["report.html"],
        "quantkit.calibrate": ["recipes/*.toml", "corpus/*.txt"],
    },
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExtension},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
    install_requires=[
        "torch>=2.10",
        "transformers>=5",
        "accelerate",
        "datasets",
        "safetensors",
        "huggingface_hub",
        "numpy",
        "typer>=0.29",
        "rich",
    ],
    extras_require={
        "gguf": ["gguf"],
        "eval": ["lm_eval"],
        "report": ["matplotlib", "jinja2"],
        "dev": [
            "pytest",
            "hypothesis",
            "ruff",
            "mypy",
            "compressed-tensors",
            "ml_dtypes",
            "gguf",
            "psutil",
            "matplotlib",
            "jinja2",
        ],
    },
    entry_points={"console_scripts": ["quantkit=quantkit.cli.main:main"]},
)
