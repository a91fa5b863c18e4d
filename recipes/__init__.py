"""Worked examples of wiring trainers to Stitch."""
