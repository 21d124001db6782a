"""Commands of `python -m assemble` that have a module of their own."""
