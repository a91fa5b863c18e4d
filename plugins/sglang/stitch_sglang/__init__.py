"""Stitch inside a stock SGLang server, through its own plugin system. SGLANG_FORK.md lists the hooks."""
