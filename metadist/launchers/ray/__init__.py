"""Workers that Ray starts: experiments, trainers for any model, searches. An extra: `.[ray]`."""
