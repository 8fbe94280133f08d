"""Benchmarks: one module a claim; ``python -m benchmarks`` runs them and writes RESULTS.md."""
