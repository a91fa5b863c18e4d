"""Stock slime publishes and rolls out through Stitch: hooks for its flags, no patch."""
