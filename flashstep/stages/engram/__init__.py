"""The Engram: n-gram memory looked up by token ids and gated into the stream (section 9 of `docs/model.md`)."""
