"""Sample data sets that ship with weft."""
