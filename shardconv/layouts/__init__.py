"""Layouts: the tensors of rank files, with their names, their order and their files."""

#: The layouts of other systems, which have a TOML file, and can be read without a manifest. Of two that have the same
#: files, the first that fits is detected.
SOURCE_LAYOUTS = ("megatron", "dcp", "deepseek", "deepspeed", "meta", "vllm")
#: The layout of torch.distributed.checkpoint.
DCP = "dcp"
#: The layouts of Meta's and Mistral's files, and of Megatron-Core's checkpoints.
META, MEGATRON = "meta", "megatron"
#: The layouts that are written without a manifest.
FOREIGN = (META, MEGATRON)
#: The layouts of serving engines.
ENGINE_LAYOUTS = ("vllm", "sglang")
#: All layouts that can be written.
LAYOUTS = ("native", DCP, *ENGINE_LAYOUTS, *FOREIGN)
