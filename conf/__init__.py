"""The configuration: one folder per group. Hydra finds it as pkg://metadist.conf."""
