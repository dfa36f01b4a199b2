"""What `store` is made of: safetensors files, folders that appear whole, and their config.json."""
