"""Models of `transformers`: training them, reading their files, converting models of model.py to and from them."""
