"""Source checkpoints: their files, tensors and quantization settings, in any format and layout."""
