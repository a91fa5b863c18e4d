"""Stitch: the versioned control plane for disaggregated reinforcement learning."""
