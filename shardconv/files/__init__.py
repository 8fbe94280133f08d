"""Files and the tensors in them: local and remote files, and safetensors, PyTorch and DCP containers."""
