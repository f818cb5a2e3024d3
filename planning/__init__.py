"""What can be known before a run: its keys by published rules, its memory, traffic and time, and the best layout."""
