"""Checks with small models: of plans and of padded checkpoints; and proposals of plan files."""
