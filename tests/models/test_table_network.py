"""The network of a table: what its first weights say of rows that training never has."""

import torch
from torch import nn

from concord.environments.table_encoder import FIRST_LEVEL
from concord.models.mlp import MLP
from concord.models.table_network import TableNetwork, WideAndDeep


def test_embeddings_of_missing_and_unknown_levels_begin_at_0_and_known_ones_do_not() -> None:
    for table in TableNetwork(2, [5, 40], outputs=3, hidden_layers=2).embeddings.parameters():
        assert (table[:FIRST_LEVEL] == 0).all()
        assert (table[FIRST_LEVEL:] != 0).all()


def test_embeddings_that_begin_at_0_leave_the_other_first_weights_as_drawn() -> None:
    torch.manual_seed(0)
    network = TableNetwork(2, [5], outputs=3)
    torch.manual_seed(0)
    table, rest = nn.Embedding(5, 3), MLP(2 + 3, 3, 64, 1)
    assert torch.equal(network.embeddings.get_parameter("0.weight")[FIRST_LEVEL:], table.weight[FIRST_LEVEL:])
    assert all(torch.equal(*pair) for pair in zip(network.rest.parameters(), rest.parameters(), strict=True))


def test_wide_and_deep_begins_as_the_constant_0_and_learns_both_parts() -> None:
    network = WideAndDeep(4, [5, 3], outputs=2, hidden_units=8)
    rows = torch.cat([torch.randn(30, 4), torch.randint(2, 3, (30, 2))], 1)
    assert (network(rows) == 0).all()
    optimizer = torch.optim.Adam(network.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(rows), (rows[:, 0] * rows[:, 1] > 0).long()).backward()
        optimizer.step()
    assert torch.equal(network(rows), network.wide(rows) + network.deep(rows))
    assert (network.wide(rows) != 0).any()
    assert (network.deep(rows) != 0).any()
