"""The command line: one file per command, each imported only when it is called.

stdout carries data, stderr talks. Exit codes: 0 done, 1 the work failed, 2 the request was wrong.
"""
