"""Model files: `llama.py` for Llama-like families, `registry.py` picks the class."""
