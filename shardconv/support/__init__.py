"""Errors, exit codes, the console and lazy imports for every package. Imports no other package."""
