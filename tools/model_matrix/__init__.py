"""Try every model type of transformers, and write docs/models.md."""
