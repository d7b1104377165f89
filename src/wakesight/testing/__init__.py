"""Small worlds for tests: random tiny models, a byte tokenizer, independent references.

Shared by our own tests and by authors of scorer plug-ins; needs no weights and no network.
"""
