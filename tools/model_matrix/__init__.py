"""Try every model type of transformers, and write docs/models.md."""

from tools.torchvision import declare_operators

declare_operators()  # in every process, before transformers asks for torchvision
