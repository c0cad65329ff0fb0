"""flashstep: low-latency DeepSeek-V4.1-Flash with DSpark speculative decoding."""

__version__ = "0.1.0"
