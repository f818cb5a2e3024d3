"""DiLoCo between independent jobs that exchange their pseudo-gradients through files: train_pool.py"""
