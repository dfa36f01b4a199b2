"""What `store` is made of: folders that appear whole, tensor files with digests, and the older format."""
