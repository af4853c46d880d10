"""The scheduler plug-in for vLLM: the only package, with `headgate.vllm`, that imports vllm."""
