"""An LLM inference server that one person can read in an afternoon."""

__version__ = "0.1.0"
