"""Which pages are in fast memory: the rules, as pure functions on arrays.

Takes what a step wants and what was resident; gives what is resident now and the moves that make it so. Next are the
simulator, which counts moves, and the engines' storage, which executes them. No keys, no values, no clock, no files.

`base.py` has the words, `step.py` the rules for reading, `compiled.py` (numba) and `on_device.py` (torch) the same
rules for speed, `policies.py` puts them together under the names that users type.
"""
