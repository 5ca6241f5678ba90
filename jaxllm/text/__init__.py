"""Text side: tokenizer, chat template, incremental detokenizer. Never sees blocks."""
