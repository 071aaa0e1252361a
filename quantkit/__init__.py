"""quantkit: FP8 quantization of language models, and a runtime for the result."""

__version__ = "0.1.0"
