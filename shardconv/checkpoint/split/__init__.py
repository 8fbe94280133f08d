"""Split checkpoints: the manifest, folders with some of the ranks, and the shards of one rank."""
