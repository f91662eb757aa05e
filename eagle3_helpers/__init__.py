"""EAGLE-3 draft training as a runbook: every line of logic behind the six notebooks."""
