"""Where evaluation items come from: one module per suite, each with TASKS and `contexts`.

Takes SuiteOptions; gives Contexts with their Questions; graders and the runner come next. Helpers beside the
suites: text.py (essays, passages, sentences), words.py (word lists), sizing.py (the largest haystack that fits).
"""
