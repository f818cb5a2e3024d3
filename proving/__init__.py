"""The parts of prove.py: one process in float64 against ranks that share the work, parameter by parameter."""
