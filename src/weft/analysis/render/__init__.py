"""Pages, SVG and PNG figures that need no network."""
