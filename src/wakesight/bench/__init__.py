"""Speed, measured so that it can be trusted: arms alternated in one run, ratios pair by pair.

Takes an engine, gives plain rows for `wakesight bench` and the scripts in benchmarks/.
"""
