"""Weight converters between Hugging Face folders and model folders: `paradec_jax.convert` to
Python.

Its commands are `paradec import|export|check`. A module per architecture holds a declarative table;
one engine reads it in both directions. Imports among its files are relative: mypy knows the folder
by the name `convert`.
"""
