"""Tasks, their scores, and text from a model: for evaluate.py, sample.py, and for scores in a run."""
