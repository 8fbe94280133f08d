"""Quantization formats, with checkpoints that the libraries make and dequantize."""
