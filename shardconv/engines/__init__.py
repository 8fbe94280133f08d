"""Support for serving engines: a vLLM plugin that loads rank files, and a check of split checkpoints against vLLM."""
