"""Stitch's embedded engine: a small, batch-invariant CPU engine for Qwen2 and Qwen3 checkpoints."""
