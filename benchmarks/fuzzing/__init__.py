"""What benchmarks/fuzz.py draws, and how it is compared."""
