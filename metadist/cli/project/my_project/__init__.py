"""An algorithm, a model and a dataset for metadist."""
