"""Layouts: the tensors of rank files, with their names, their order and their files."""

#: The layouts of other systems, which have a TOML file, and can be read without a manifest.
SOURCE_LAYOUTS = ("dcp", "deepseek", "deepspeed", "meta", "vllm")
#: The layout of Meta's and Mistral's files, which is written without a manifest.
META = "meta"
#: All layouts that can be written.
LAYOUTS = ("native", "dcp", "vllm", META)
