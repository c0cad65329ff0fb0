"""Latency-specialized decode: packed weights, the launches of a step, its graph, and the step around them."""
