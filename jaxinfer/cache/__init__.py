"""The paged KV cache: the host's block manager and the device's pool."""
