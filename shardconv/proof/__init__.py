"""Proofs of plans with small models, proposals of plan files, and padding of checkpoints."""
