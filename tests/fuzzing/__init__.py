"""What tests/fuzz.py draws, and with what it compares it."""
