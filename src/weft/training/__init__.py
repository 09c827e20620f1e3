"""The loop, and what it stands on."""
