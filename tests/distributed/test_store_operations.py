"""Requests to the job's store grow in proportion to the number of ranks."""

from benchmarks.store_operations import count_requests


def test_requests_are_linear_in_all_and_constant_for_each_rank():
    small, large = (
        {each.operation: each.by_client for each in count_requests(clients)} for clients in (16, 64)
    )
    assert small.keys() == large.keys() == {"rendezvous", "all_gather", "heartbeat"}
    for operation, by_client in large.items():
        assert max(by_client) <= 6, operation
        assert sum(by_client) <= 4.5 * sum(small[operation]), operation


def test_a_node_is_one_client_of_rank_zero():
    heartbeat = count_requests(8, node_size=4)[-1].by_client
    assert heartbeat[1:4] == heartbeat[5:] == [1, 1, 1]  # first failures only
