"""Layer 3: decoder, tokenizer, chat rendering, weights in and out."""
