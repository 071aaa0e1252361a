"""The inference side: load a quantized checkpoint and run it. Never imports calibration."""
