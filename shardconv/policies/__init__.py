"""Policies: the rules of a model written as Python classes, with parallelformers' names."""
