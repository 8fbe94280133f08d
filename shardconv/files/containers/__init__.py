"""Containers of tensors: safetensors files, files of torch.save, and the files of torch.distributed.checkpoint."""
