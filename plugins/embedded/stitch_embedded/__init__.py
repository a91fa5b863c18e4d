"""The embedded engine: a small torch CPU engine for Qwen2 and Qwen3 checkpoints."""
