"""Step 1: a name, folder, GGUF file or hub id -> a model we know how to read.

Takes what a user typed, gives a `LoadedModel` and the facts of its family; next are the signal taps.
"""
