"""Step 2: what a normal forward pass lets us overhear.

Takes the tensors an attention layer handles anyway, gives the streams of `Signals`; next is scores.
Keys and values need no recording: they are read from the cache itself.
"""
