"""The stock trainer of miles-rl through Stitch, on CPUs."""
