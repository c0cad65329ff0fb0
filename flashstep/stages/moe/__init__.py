"""Mixture of experts: router, routed experts, shared expert."""
