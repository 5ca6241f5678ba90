"""Other engines beside jaxllm: the same weights, the same token ids, in one run."""
