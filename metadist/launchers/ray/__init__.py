"""Ray: experiments in Ray Train workers, `PyTorchTrainer`, and Ray Tune searches (`.[ray]`)."""
