"""Families: rules for the tensors and modules of model architectures, as data, and their loader."""
