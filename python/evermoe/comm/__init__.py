"""Membership, failure detection, and transport of bytes between members."""
