"""What benchmarks/fuzz.py draws, and with what it compares it."""
