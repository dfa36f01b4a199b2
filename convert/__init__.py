"""Weight converters between Hugging Face folders and model folders of paradec_jax.

Run as `python -m convert import|export|check`. A module per architecture holds a declarative table; one
engine reads it in both directions.
"""
