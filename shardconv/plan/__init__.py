"""Plans: which tensor of a checkpoint is sharded along which dim, as plain data and pure functions."""
