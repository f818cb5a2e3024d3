"""Programs that measure: README.md and docs/ name them beside the figures that they print."""
