"""The report of a run: one HTML file made of what its folder holds."""
