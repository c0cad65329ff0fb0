"""Compressor and indexer: compressed KV entries, index keys, and the choice of entries that rows attend to."""
