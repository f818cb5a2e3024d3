"""Before a run: published rules, memory, traffic, time, and which layout."""
