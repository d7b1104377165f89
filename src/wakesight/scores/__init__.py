"""Step 3: how useful will each entry be?

Takes `Signals` of one prefilled context (never a question), gives `Scores`; next is budget.
One file per method, `table.py` is the list. A scorer is a frozen dataclass with `reads`, the
names of the signals it needs, and `score(signals) -> Scores`.
"""
