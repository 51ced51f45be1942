"""The engine: scheduler, KV blocks, the workers of one TP group and the speculative step."""
