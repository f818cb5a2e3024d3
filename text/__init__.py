"""What prepare_data.py needs: sources of text, documents, conversations, tokenizers, shards on disk."""
