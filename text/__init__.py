"""The parts of prepare_data.py: sources of text, documents, conversations, tokenizers, encoding."""
