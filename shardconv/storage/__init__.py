"""Remote files: URLs, object stores, HTTP servers and the Hugging Face Hub, read by ranges of bytes; no torch."""
