"""Step 4: how many entries each (attention layer, KV head) may keep.

Takes a fraction, a count or a byte limit, the model's geometry and, for some rules, the scores or tables that were
measured offline; gives a `Budget` of integers; next is selection. `rounding.py` is the only place where p becomes a
count.
"""
