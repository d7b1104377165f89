"""Traces times policies -> misses, memory, transfers, stall time. No model, no engine.

Takes page wants (`traces/pages.py`) and the step functions (`cache/residency`); gives counts per step (`tally.py`),
rows for people (`sweep.py`), comparisons at equal memory or budget (`compare.py`). Decisions are never made here:
`stepping.py` plays any policy with any body, `whole_runs.py` plays the same rules faster, and tests hold the two to
equal counts.
"""
