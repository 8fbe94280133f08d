"""Sharded tensors over torch's DTensor: specs, redistribution, hooks, and what communication costs."""
