"""Benchmarks: ``python -m benchmarks`` runs them and writes RESULTS.md."""
