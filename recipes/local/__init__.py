"""The whole loop on one machine: a tiny policy trains with GRPO while an elastic fleet follows it."""
