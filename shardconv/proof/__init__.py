"""Proof that a plan is right for a model: a small model of its shape, split and compared with the plain one."""
