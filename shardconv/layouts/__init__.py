"""Layouts: which tensors rank files hold, under which names, in which order and in which files."""
