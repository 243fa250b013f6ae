"""Fault injection: real processes are killed, frozen or disconnected (`make faults`)."""
