"""The stages of a step. Each folder holds one stage: its exact reference, its kernels, its test."""
