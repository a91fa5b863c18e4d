"""Recipes: one typed configuration for each model, and everything that is generated from it."""
