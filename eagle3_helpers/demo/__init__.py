"""The demo: a real target out of a package, and the story of a crash and its recovery."""
