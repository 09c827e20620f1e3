"""Import and export of other libraries' checkpoint formats."""
