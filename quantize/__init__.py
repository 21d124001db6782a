"""The pipeline: BF16 checkpoint in, verified NVFP4 checkpoint out. Everything that needs a model lives here."""
