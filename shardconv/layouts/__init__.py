"""Layouts: the tensors of rank files, with their names, their order and their files."""

#: The layouts with the names of the source tensors, and the layouts of other systems, which have a TOML file.
NATIVE_NAME, DCP_NAME = "native", "dcp"
SYSTEMS = ("deepseek", "deepspeed", "meta", "vllm")
#: The layout of Meta's and Mistral's files, which is written without a manifest.
META = "meta"
#: All layouts that can be written.
LAYOUTS = (NATIVE_NAME, DCP_NAME, "vllm", META)
#: All layouts of other tools that can be read without a manifest.
SOURCE_LAYOUTS = (*SYSTEMS, DCP_NAME)
