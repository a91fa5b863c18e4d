"""Stitch's embedded engine: a small, batch-invariant CPU engine for Qwen2 and Qwen3 checkpoints."""

import os

# MKL's fp32 kernels choose their summation order by the number of rows, on CPUs with AMX also above 8 rows.
# Its strict mode does not. MKL reads this at its first call, which may come before a model is loaded.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
