"""DiLoCo's exchange over files, when replicas are jobs of their own: train_diloco.py --exchange=..."""
