"""Measurements: speed of a model, of its kernels, and of the machine they run on."""
