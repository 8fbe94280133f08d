"""Quantization formats: how a logical matrix is stored as packed values, scales, zero points and indices.

A format is a table of ``formats.toml``. ``settings`` selects the table and its block sizes by the quantization settings
of a checkpoint, ``detect`` gives each stored tensor its grid. Nothing here reads data or needs torch.
"""
