"""The engine on Hugging Face transformers. `compat.py` is the only place that knows its versions."""
