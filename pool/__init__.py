"""DiLoCo's exchange over files, when replicas are jobs of their own: train_pool.py"""
