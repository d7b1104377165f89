"""Step 10: what happened, for people: text strips, pictures, tables. Reads results, runs nothing."""
