"""Every number in README.md and docs/ that is not printed by a run has its command here."""
