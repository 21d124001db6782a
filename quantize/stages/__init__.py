"""The stages' work, one module each; thin: what they call lies in `assemble` and beside this folder."""
