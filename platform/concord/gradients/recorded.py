"""A function's tensor operations, recorded once and replayed: without autograd, vmap and Python that led to them."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves


def recorded(function: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """The operations of ``function`` on arguments of these shapes and dtypes, to be called in its place.

    Every bit of the result is the function's own: what is left out is what nobody uses, what is computed a second time
    from the same (the halves of a penalty share much), and turning the same number into a tensor at every call. What
    is drawn at random is drawn anew at each call; what Python decides stays as it was. Recording itself draws, too.
    """
    module = make_fx(function)(*arguments)
    module.graph.eliminate_dead_code()  # vmap leaves some
    # Who gets a result may write into it, so that is neither shared nor kept.
    written = {_source(argument) for node in module.graph.nodes for argument in _written_by(node)}
    written |= {_source(result) for result in module.graph.output_node().all_input_nodes}
    _keep_constants(module, written)
    _share_what_repeats(module.graph, written)
    module.recompile()
    return module


def _keep_constants(module: fx.GraphModule, written: set[fx.Node]) -> None:
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._to_copy.default and not node.all_input_nodes and node not in written:
            name = f"constant_{node.name}"
            module.register_buffer(name, node.target(*node.args, **node.kwargs))
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(name))
            module.graph.erase_node(node)


def _share_what_repeats(graph: fx.Graph, written: set[fx.Node]) -> None:
    first: dict[tuple[Any, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
            continue
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            continue
        if any(_source(each) in written for each in (node, *node.all_input_nodes)):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # nodes by their names
        if first.setdefault(key, node) is not node:
            node.replace_all_uses_with(first[key])
            graph.erase_node(node)


def _source(node: fx.Node) -> fx.Node:
    """Whose memory a node's value is: a view's is that of what is viewed."""
    while node.all_input_nodes and (node.target is operator.getitem or _is_view(node.target)):
        node = node.all_input_nodes[0]
    return node


def _is_view(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    # One operation is a view that does not say so.
    alias = any(result.alias_info is not None for result in target._schema.returns)
    return alias or target is torch.ops.aten._unsafe_view.default


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The nodes into whose values this one writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    parameters = node.target._schema.arguments
    given = [*zip(parameters, node.args, strict=False), *((each, node.kwargs.get(each.name)) for each in parameters)]
    written = [
        value for parameter, value in given if parameter.alias_info is not None and parameter.alias_info.is_write
    ]
    return [each for each in tree_leaves(written) if isinstance(each, fx.Node)]
