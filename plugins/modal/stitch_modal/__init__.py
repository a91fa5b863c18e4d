"""Stores on Modal Volumes: `modal://volume/prefix`."""
