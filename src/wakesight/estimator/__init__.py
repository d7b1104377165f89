"""Between signals and scores: what was learned offline about one model, ready to read new contexts.

Takes `Signals`, gives a predicted utility per entry. `features.py` says what a reader sees, `net.py` holds the small
networks (one per attention layer and KV head), `reference.py` is the same in plain loops, `artifact.py` is the folder
in which all of it is kept. Next is scores; training lives in learning.
"""
