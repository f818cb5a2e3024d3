"""What replicas of train_diloco.py send to each other."""
