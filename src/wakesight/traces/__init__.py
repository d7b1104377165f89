"""Attention logs as data: what every head attended to at every decode step.

Takes an engine and a text (recorder.py), gives a folder of traces (store.py); next come the simulator and the studies
of churn and prediction, which read a trace as page wants (pages.py) or head by head.
"""
