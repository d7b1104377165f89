"""Step 5: which entries stay.

Takes `Scores` and a `Budget`, gives a `KeptSet`; next is the cache. The order of a session's
entries is worked out once (`rank`) and every fraction of a sweep takes its head (`take`).
To evict by page, `pages.lift` the scores before and `pages.snap` the budget after.
"""
