"""The stages' Triton kernels composed into a model: prompts, mixed steps and any batch, on NVIDIA and AMD GPUs."""
