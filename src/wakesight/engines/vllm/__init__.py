"""Step 7 inside vLLM: compacted sessions in an unmodified engine.

Takes requests with flat keys (`keys.py`), gives sessions whose blocks went back to the pool. The scheduler's half is
`sessions.py`, `counts.py` and `scheduling.py`, the worker's half `working.py`, `taps.py` and `pages.py`; what one tells
the other travels on vLLM's own messages (`messages.py`). Everything that touches a vLLM class is in `patches.py`, the
only module here that needs vLLM to be imported. vLLM's "block" is a block in this folder and nowhere else.
"""
