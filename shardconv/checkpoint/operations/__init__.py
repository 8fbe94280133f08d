"""Split, merge, reshard, pad and verify checkpoints, and report on their plans."""
