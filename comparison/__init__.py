"""What compare.py needs: results of runs, what they say, and pictures of them."""
