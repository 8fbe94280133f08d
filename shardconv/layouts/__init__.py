"""Layouts: the tensors of rank files, with their names, their order and their files."""
