"""Text to ids and back: the tokenizer, the chat template in its bounds, streams of characters."""
