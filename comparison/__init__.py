"""The parts of compare.py: which runs to do, what they measured, what follows from that, and pictures."""
