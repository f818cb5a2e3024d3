"""Tasks and their scores, and text from a model, for evaluate.py, for sample.py and for scores during a run."""
