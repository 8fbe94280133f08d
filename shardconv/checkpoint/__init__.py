"""Checkpoints on disk: read, split, merge, reshard, pad and verify them."""
