"""The network of a table: what its first weights say of rows that training never has."""

import torch
from torch import nn

from concord.environments.table_encoder import FIRST_LEVEL
from concord.models.mlp import MLP
from concord.models.table_network import TableNetwork


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
