"""Step 6: where entries live.

Takes keys, values and recurrent states from an engine and a `KeptSet` from selection; gives session
states that really hold only what was kept; next are the engines. Nothing here knows how an entry was
scored, and nothing here knows a model.
"""
