"""Proofs of plans and of padded checkpoints: compare a small model with the unsharded one; and proposals of plan files."""
