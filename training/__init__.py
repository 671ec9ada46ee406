"""How the demo pair was made: corpus, tokenizer, target, drafter, export, checks."""
