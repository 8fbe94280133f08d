"""Proofs of plans: compare a small sharded model with the unsharded one; and proposals of plan files."""
