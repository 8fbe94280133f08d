"""Which tensor is cut how: pure data and pure functions."""
