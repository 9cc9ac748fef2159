"""Training sparse-depth language models (X-MoD) with DeepSpeed."""

__version__ = "0.1.0"
