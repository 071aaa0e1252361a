"""Tests that need an NVIDIA GPU and the compiled CUDA kernels; `make gpu-check` runs them."""
