"""Replicas of released programs, quirk for quirk. Only tests and studies import them."""
