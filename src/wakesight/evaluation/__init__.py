"""Step 8: an engine and a suite -> a run record that a comparison can be defended with.

Takes contexts with questions (`suites/`), runs every arm of every question on one prefill per context
(`runner.py`), marks the answers (`graders/`), and gives a run folder; next is the report.
"""
