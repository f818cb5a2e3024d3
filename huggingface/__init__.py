"""What models of transformers need: training them, reading their files, converting ours to theirs."""
