"""Step 7: run a model over the states that the cache holds.

Takes token ids, policies and states; gives sessions, scores' signals and answers. `base.py` is the
protocol that evaluation sees; `session.py` is what a user holds; `hf/` runs on transformers.
"""
