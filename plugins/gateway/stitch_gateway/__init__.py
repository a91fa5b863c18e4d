"""The gateway: one address in front of every replica."""
