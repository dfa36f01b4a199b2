"""Text in and out: conversations and their templates, tokenizers, strings that end an answer."""
