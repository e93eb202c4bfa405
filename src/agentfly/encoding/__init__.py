"""Messages to text and text to ids, below the templates: rendering, forms, the codec, tokenizers."""
