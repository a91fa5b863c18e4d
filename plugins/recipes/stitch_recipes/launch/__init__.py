"""Launchers: what starts a recipe's processes over ssh, on Kubernetes or on Modal.

Each makes files from a recipe and a site; command lines are processes.py's.
"""
