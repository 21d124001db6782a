"""Recipes: what is done to a checkpoint, as data. No torch, no model, no machine."""
