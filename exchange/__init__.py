"""The exchange between the replicas of train_diloco.py: encodings, collectives, and checks of it."""
